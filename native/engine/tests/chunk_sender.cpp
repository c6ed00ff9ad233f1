// chunk_sender.cpp: whatever sockets take, each stream gets its text whole and in order: what the sender has written,
// and then the rests. Ids and tokens are those of all rows that were not left.
//
//   chunk_sender                3,000 messages to 8 streams with small buffers
//   chunk_sender --quick        300
#include "chunk_sender.h"

#include <array>
#include <map>

#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

constexpr int STREAMS = 8;
constexpr u64 WORDS = 8;  // tokens; a histogram with four bounds

struct Client {
    int own_end = -1, peer_end = -1;
    bool is_added = false, is_chunked = false, keeps_ids = false;
    std::string expected, received, unsent;  // unsent: rests that its transport has not written
    std::vector<i32> expected_ids, ids;
    u64 expected_tokens = 0, tokens = 0;

    void read() {
        char buffer[4096];
        for (ssize_t nbytes; (nbytes = ::recv(peer_end, buffer, sizeof buffer, MSG_DONTWAIT)) > 0;)
            received.append(buffer, static_cast<size_t>(nbytes));
    }
    void flush() {  // as a transport does
        while (!unsent.empty()) {
            ssize_t nbytes = ::send(own_end, unsent.data(), unsent.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            if (nbytes <= 0) return;
            unsent.erase(0, static_cast<size_t>(nbytes));
        }
    }
    void take(ChunkSender& sender, i32 request) {
        auto progress = sender.take(request);
        REQUIRE(progress.has_value(), "request %d", request);
        ids.insert(ids.end(), progress->ids.begin(), progress->ids.end());
        tokens += progress->tokens;
    }
};

std::string frame(const std::string& text, bool is_chunked) {
    return is_chunked ? format("%zx\r\n", text.size()) + text + "\r\n" : text;
}

struct Message {
    std::vector<i32> requests, lengths, ids;
    std::vector<u16> counts, samples, finished;
    std::string text;
    std::vector<std::string> texts;
    std::vector<i32> numbers;

    DeltaRows rows() {
        numbers = requests;
        numbers.insert(numbers.end(), lengths.begin(), lengths.end());
        numbers.insert(numbers.end(), ids.begin(), ids.end());
        return {requests.size(), numbers.data(), numbers.size(),  text.data(),    text.size(),
                counts.data(),   samples.data(), finished.data(), finished.size()};
    }
};

Message random_message(Random& random) {
    Message message;
    for (u64 row = 0, rows = random.below(2 * STREAMS); row < rows; ++row) {
        message.requests.push_back(static_cast<i32>(random.below(STREAMS + 2)));  // two are never added
        std::string text(random.one_in(4) ? 0 : random.below(3000), static_cast<char>('a' + random.below(26)));
        message.lengths.push_back(static_cast<i32>(text.size()));
        message.texts.push_back(text);
        message.text += text;
        message.counts.push_back(static_cast<u16>(random.below(4)));
        for (int id = 0; id < message.counts.back(); ++id) message.ids.push_back(static_cast<i32>(random.below(1000)));
        message.samples.push_back(random.one_in(8));
        if (random.one_in(8)) message.finished.push_back(static_cast<u16>(row));
    }
    return message;
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Random random(arguments.seed);
    std::array<Counter, WORDS> words{};
    TokenCounters counters(&words[0], &words[1], {0.001, 0.01, 0.1, 1.0});
    ChunkSender sender;
    std::array<Client, STREAMS> clients;
    for (Client& client : clients) {
        int pair[2], nbytes = 4096;
        REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "%s", std::strerror(errno));
        ::setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &nbytes, sizeof nbytes);
        client.own_end = pair[0], client.peer_end = pair[1];
        client.is_chunked = random.one_in(2), client.keeps_ids = random.one_in(2);
    }
    u64 num_rests = 0, num_left = 0, num_sent = 0;
    const int messages = arguments.is_quick ? 300 : 3'000;
    for (int number = 0; number < messages; ++number) {
        for (i32 request = 0; request < STREAMS; ++request) {
            Client& client = clients[static_cast<size_t>(request)];
            if (!client.is_added && client.unsent.empty()) {
                sender.add(request, client.own_end, client.is_chunked, client.keeps_ids, &counters, 0);
                client.is_added = true;
            }
        }
        Message message = random_message(random);
        DeltaRows rows = message.rows();
        std::vector<RowLeft> left;
        std::vector<TextRest> rests;
        sender.send(rows, left, rests);
        size_t next = 0, id_at = 2 * rows.rows, text_at = 0;
        for (u64 row = 0; row < rows.rows; ++row) {
            i32 request = message.requests[row];
            bool is_last = std::find(message.finished.begin(), message.finished.end(), row) != message.finished.end();
            bool is_left = request >= STREAMS || message.samples[row] != 0 || is_last ||
                           !clients[static_cast<size_t>(request)].is_added;
            if (is_left) {
                REQUIRE(next < left.size(), "row %zu", static_cast<size_t>(row));
                const RowLeft& row_left = left[next++];
                REQUIRE(row_left.row == row && row_left.request == request && row_left.sample == message.samples[row] &&
                            row_left.text_at == text_at && row_left.nbytes == message.texts[row].size() &&
                            row_left.id_at == id_at && row_left.ids == message.counts[row],
                        "row %zu", static_cast<size_t>(row));
            } else {
                Client& client = clients[static_cast<size_t>(request)];
                if (!message.texts[row].empty()) client.expected += frame(message.texts[row], client.is_chunked);
                if (client.keeps_ids)
                    client.expected_ids.insert(
                        client.expected_ids.end(), message.numbers.begin() + static_cast<long>(id_at),
                        message.numbers.begin() + static_cast<long>(id_at + message.counts[row]));
                client.expected_tokens += message.counts[row];
                ++num_sent;
            }
            text_at += message.texts[row].size();
            id_at += message.counts[row];
        }
        REQUIRE(next == left.size(), "%zu rows left, %zu expected", left.size(), next);
        for (const TextRest& rest : rests) {
            Client& client = clients[static_cast<size_t>(rest.request)];
            client.unsent += frame(message.text.substr(rest.text_at, rest.nbytes), client.is_chunked).substr(rest.sent);
            if (client.is_added) {
                client.take(sender, rest.request);
                sender.remove(rest.request);
                client.is_added = false;
            }
        }
        num_rests += rests.size(), num_left += left.size();
        Client& slow = clients[random.below(STREAMS)];
        slow.read(), slow.flush();
    }
    u64 tokens = 0;
    for (i32 request = 0; request < STREAMS; ++request) {
        Client& client = clients[static_cast<size_t>(request)];
        if (client.is_added) client.take(sender, request), sender.remove(request);
        for (client.read(); !client.unsent.empty(); client.read()) client.flush();
        client.read();
        REQUIRE(client.received == client.expected, "stream %d: %zu bytes, %zu expected", request,
                client.received.size(), client.expected.size());
        REQUIRE(client.ids == client.expected_ids, "ids of stream %d", request);
        REQUIRE(client.tokens == client.expected_tokens, "tokens of stream %d", request);
        tokens += client.tokens;
        ::close(client.own_end), ::close(client.peer_end);
    }
    REQUIRE(sender.size() == 0, "%zu streams", static_cast<size_t>(sender.size()));
    REQUIRE(words[0].value() == tokens, "counted");
    u64 observed = 0;
    for (size_t bound = 1; bound <= 5; ++bound) observed += words[bound].value();
    REQUIRE(observed == tokens, "observed");

    // A client that has gone: no signal, and the text is a rest, which its transport will fail to write.
    int pair[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "%s", std::strerror(errno));
    sender.add(1, pair[0], true, true, &counters, 0);
    ::close(pair[1]);
    i32 numbers[] = {1, 2, 7};
    std::vector<RowLeft> left;
    std::vector<TextRest> rests;
    sender.send({1, numbers, 3, "ab", 2, nullptr, nullptr, nullptr, 0}, left, rests);
    REQUIRE(left.empty() && rests.size() == 1 && rests[0].sent == 0, "%zu rests", rests.size());
    ::close(pair[0]);

    // Columns that do not fit the text or the ids.
    i32 too_long[] = {1, 3, 7}, negative[] = {1, -1, 7};
    u16 counts[] = {2};
    for (DeltaRows rows : {DeltaRows{1, too_long, 3, "ab", 2, nullptr, nullptr, nullptr, 0},
                           DeltaRows{1, negative, 3, "ab", 2, nullptr, nullptr, nullptr, 0},
                           DeltaRows{1, numbers, 3, "ab", 2, counts, nullptr, nullptr, 0}}) {
        bool is_refused = false;
        try {
            sender.send(rows, left, rests);
        } catch (const std::invalid_argument&) {
            is_refused = true;
        }
        REQUIRE(is_refused, "columns");
    }
    REQUIRE(num_rests > 0 && num_left > 0, "%zu rests, %zu rows left", static_cast<size_t>(num_rests),
            static_cast<size_t>(num_left));
    std::printf("%zu rows sent, %zu left, %zu rests\n", static_cast<size_t>(num_sent), static_cast<size_t>(num_left),
                static_cast<size_t>(num_rests));
    return 0;
}
