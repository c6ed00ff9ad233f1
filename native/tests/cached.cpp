// cached.cpp: publishing a block takes memory for that block alone, however many are found by then. A table that grows
// while it is filled moves all that it holds at once: with a million blocks that held the core up for 120 ms.
//
//   cached                      100,000 blocks
//   cached --quick              5,000
#include "cached.h"

#include <cstdlib>
#include <new>

#include "testing.h"

using namespace testing;

namespace {

std::size_t largest = 0;  // of what was allocated since it was set to zero

}  // namespace

// Not inlined: the compiler would take what it sees of them for a pair that does not match.
__attribute__((noinline)) void* operator new(std::size_t nbytes) {
    largest = std::max(largest, nbytes);
    if (void* at = std::malloc(nbytes)) return at;
    throw std::bad_alloc();
}
__attribute__((noinline)) void operator delete(void* at) noexcept { std::free(at); }
__attribute__((noinline)) void operator delete(void* at, std::size_t) noexcept { std::free(at); }

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    const u32 blocks = arguments.is_quick ? 5'000 : 100'000;
    CachedBlocks cache(blocks);
    std::vector<i32> taken(blocks);
    REQUIRE(cache.take(blocks, taken.data()), "%u blocks", blocks);
    Digest digest{};
    largest = 0;
    for (u32 block = 0; block < blocks; ++block) {
        std::memcpy(digest.data(), &block, sizeof block);
        REQUIRE(cache.publish(block, digest), "block %u", block);
    }
    const std::size_t most = largest;
    REQUIRE(most < 256, "%zu bytes at once", most);
    u32 found = 0;
    REQUIRE(cache.find(digest, found) && found == blocks - 1, "block %u", found);
    const char* wrong = cache.wrong();
    REQUIRE(wrong == nullptr, "%s", wrong);
    std::printf("%u blocks, %zu bytes at most for one\n", blocks, most);
    return 0;
}
