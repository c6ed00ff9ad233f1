// bells.cpp: threads wake peers through the peers' pipes, while these peers join, leave and die. No descriptor of a
// gone peer stays open, and no byte reaches a pipe that has got the number of a closed one.
#include <poll.h>

#include "testing.h"

using namespace testing;

namespace {

u64 open_pipes() {
    u64 count = 0;
    DIR* folder = ::opendir("/proc/self/fd");
    REQUIRE(folder != nullptr, "opendir: %s", std::strerror(errno));
    while (dirent* entry = ::readdir(folder)) {
        char target[8] = {};
        std::string path = format("/proc/self/fd/%s", entry->d_name);
        if (::readlink(path.c_str(), target, sizeof target - 1) > 0 && std::strncmp(target, "pipe:", 5) == 0) ++count;
    }
    ::closedir(folder);
    return count;
}

void await_byte(int fd) {
    pollfd waiting{fd, POLLIN, 0};
    REQUIRE(::poll(&waiting, 1, 20'000) == 1, "no byte within 20 s");
    char bytes[64];
    while (::read(fd, bytes, sizeof bytes) > 0) {}
}

// The numbers of closed descriptors are given to these pipes: a byte in one was written for a peer.
void require_empty_pipes(const Atomic<bool>& is_over) {
    while (!is_over.load(RELAXED)) {
        int ends[2];
        REQUIRE(::pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0, "pipe2: %s", std::strerror(errno));
        ::sched_yield();
        char byte;
        REQUIRE(::read(ends[0], &byte, 1) < 0 && errno == EAGAIN, "a byte for a peer is in another pipe");
        for (int fd : ends) ::close(fd);
    }
}

void wakers_hold_no_pipe_of_a_peer_that_left(u64 rounds) {
    auto segment = create(pool_shape(1 << 16, 16), "bells");
    auto holder = Attachment::join(segment, "holder");
    u64 before = open_pipes();
    Atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
        threads.emplace_back([&] {
            while (!is_over.load(RELAXED)) {
                for (u32 slot = 1; slot < holder->shape().max_peers; ++slot) holder->wake_async(slot);
                ::sched_yield();
            }
        });
    threads.emplace_back([&] { require_empty_pipes(is_over); });
    for (u64 round = 0; round < rounds; ++round) {
        auto guest = Attachment::join(WATCHES_THREADS ? segment : map_again(*segment), "guest");
        await_byte(guest->bell_fd());
    }
    is_over.store(true, RELAXED);
    for (std::thread& thread : threads) thread.join();
    holder->resync();
    REQUIRE(open_pipes() == before, "%" PRIu64 " pipes more", open_pipes() - before);
}

void a_waker_closes_the_pipe_of_a_peer_that_died() {
    auto segment = create(pool_shape(1 << 16, 16), "bells");
    int talk[2];
    REQUIRE(::pipe2(talk, O_NONBLOCK) == 0, "pipe: %s", std::strerror(errno));
    pid_t child = ::fork();
    if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        auto guest = Attachment::join(map_again(*segment), "guest");
        guest->bell_fd();
        REQUIRE(::write(talk[1], "r", 1) == 1, "write: %s", std::strerror(errno));
        for (;;) ::pause();
    }
    await_byte(talk[0]);
    auto holder = Attachment::join(segment, "holder");
    holder->wake_async(0);
    u64 before = open_pipes();
    ::kill(child, SIGKILL);
    for (u64 until = now_ns() + 20'000'000'000; open_pipes() != before - 1; ::usleep(1000))
        REQUIRE(now_ns() < until, "the pipe of a dead peer is open after 20 s");
    ::waitpid(child, nullptr, 0);
    holder->wake_async(0);
    REQUIRE(open_pipes() == before - 1, "the pipe of a dead peer was opened again");
    for (int fd : talk) ::close(fd);
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    if (knows_others_start()) a_waker_closes_the_pipe_of_a_peer_that_died();  // early: it forks
    wakers_hold_no_pipe_of_a_peer_that_left((arguments.is_quick ? 300 : 10'000) * arguments.scale);
    return 0;
}
