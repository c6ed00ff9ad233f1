// chunk_sender.h: writes the chunks of streamed answers to the sockets of their HTTP clients, without the interpreter.
//
// A server adds a stream of a connection without unsent bytes. From then on, the text of each row of a `Delta` goes
// from there to the socket, but for the last row of the stream, and is counted. What a socket does not take is a rest:
// the server writes rests by the transport of the connection, and removes the stream. Until then, all further text of
// the stream is a rest, too, so the order of its bytes stays.
#pragma once
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "atomic.h"
#include "clock.h"
#include "errors.h"

namespace penstock::engine {

// Counters of one engine's tokens in the row of a server process, which alone writes them.
class TokenCounters {
   public:
    // `histogram`: of the seconds from one token to the next; a word for each bound, one for larger values, and the
    // sum.
    TokenCounters(Counter* tokens, Counter* histogram, std::vector<double> bounds)
        : tokens_(tokens), histogram_(histogram), bounds_(std::move(bounds)) {}

    void count(u64 tokens, double seconds) const {
        double each = seconds / static_cast<double>(tokens);
        auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), each) - bounds_.begin();
        tokens_->count(tokens);
        histogram_[bound].count(tokens);
        histogram_[bounds_.size() + 1].count(static_cast<u64>(each * 1e9) * tokens);
    }

   private:
    Counter* tokens_;
    Counter* histogram_;
    std::vector<double> bounds_;
};

// What a stream has got since it was added, or since this was taken last.
struct StreamProgress {
    std::vector<i32> ids;
    u64 tokens = 0;
    double last = 0;  // seconds of CLOCK_MONOTONIC; when the last token was passed on
};

// The columns of a `Delta`.
struct DeltaRows {
    u64 rows;
    const i32* numbers;  // requests, one a row; lengths of their texts, one a row; ids
    u64 num_numbers;
    const char* text;
    u64 nbytes;
    const u16* counts;    // of each row's ids; null: one each
    const u16* samples;   // null: all 0
    const u16* finished;  // rows that are the last of their sample
    u64 num_finished;
};

// A row for the server: its text begins at `text_at`, its ids at `id_at` of the numbers.
struct RowLeft {
    u64 row, text_at, nbytes, id_at, ids;
    i32 request, sample;
};

// A text of which the first `sent` bytes of its frame were written.
struct TextRest {
    i32 request;
    u64 text_at, nbytes, sent;
};

// Of one thread: `send` is called without the interpreter, and there is no lock.
class ChunkSender {
   public:
    // `is_chunked`: text is framed as a chunk of HTTP/1.1. `keeps_ids`: the ids are a part of the progress.
    void add(i32 request, int fd, bool is_chunked, bool keeps_ids, const TokenCounters* counters, double last) {
        bool is_new = streams_.try_emplace(request, Stream{fd, is_chunked, keeps_ids, counters, {{}, 0, last}}).second;
        if (!is_new) throw std::invalid_argument(format("request %d has been added", request));
    }

    // Returns the progress, and begins it anew. None: the request was not added.
    std::optional<StreamProgress> take(i32 request) {
        auto stream = streams_.find(request);
        if (stream == streams_.end()) return std::nullopt;
        StreamProgress& progress = stream->second.progress;
        StreamProgress taken{std::exchange(progress.ids, {}), std::exchange(progress.tokens, 0), progress.last};
        return taken;
    }

    void remove(i32 request) { streams_.erase(request); }
    u64 size() const { return streams_.size(); }

    // Sends the rows of streams that were added. Appends the other rows to `left`, and what sockets did not take to
    // `rests`.
    void send(const DeltaRows& delta, std::vector<RowLeft>& left, std::vector<TextRest>& rests) {
        require_fit(delta);
        std::vector<bool> is_last(delta.rows);
        for (u64 at = 0; at < delta.num_finished; ++at) is_last[delta.finished[at]] = true;
        u64 text_at = 0, id_at = 2 * delta.rows;
        for (u64 row = 0; row < delta.rows; ++row) {
            i32 request = delta.numbers[row], nbytes = delta.numbers[delta.rows + row];
            u64 ids = delta.counts == nullptr ? 1 : delta.counts[row];
            i32 sample = delta.samples == nullptr ? 0 : delta.samples[row];
            RowLeft whole{row, text_at, static_cast<u64>(nbytes), id_at, ids, request, sample};
            auto stream = streams_.find(request);
            if (stream == streams_.end() || is_last[row] || sample != 0)
                left.push_back(whole);
            else
                send_row(stream->second, whole, delta, rests);
            text_at += whole.nbytes;
            id_at += ids;
        }
    }

   private:
    struct Stream {
        int fd;
        bool is_chunked;
        bool keeps_ids;
        const TokenCounters* counters;
        StreamProgress progress;
        bool is_behind = false;  // the socket has not taken all
    };

    // Before a row is sent. Throws std::invalid_argument.
    static void require_fit(const DeltaRows& delta) {
        u64 nbytes = 0, ids = delta.counts == nullptr ? delta.rows : 0;
        for (u64 row = 0; row < delta.rows; ++row) {
            i32 length = delta.numbers[delta.rows + row];
            if (length < 0) throw std::invalid_argument(format("expected a length of a text, got %d", length));
            nbytes += static_cast<u64>(length);
            if (delta.counts != nullptr) ids += delta.counts[row];
        }
        for (u64 at = 0; at < delta.num_finished; ++at)
            if (delta.finished[at] >= delta.rows)
                throw std::invalid_argument(format("expected a row that ends, got %u", delta.finished[at]));
        if (nbytes > delta.nbytes || ids > delta.num_numbers - 2 * delta.rows)
            throw std::invalid_argument(format(
                "expected texts of %llu bytes and %llu ids, got %llu and %llu", static_cast<unsigned long long>(nbytes),
                static_cast<unsigned long long>(ids), static_cast<unsigned long long>(delta.nbytes),
                static_cast<unsigned long long>(delta.num_numbers - 2 * delta.rows)));
    }

    void send_row(Stream& stream, const RowLeft& row, const DeltaRows& delta, std::vector<TextRest>& rests) {
        if (row.nbytes != 0) {
            u64 sent = 0;
            if (!stream.is_behind && !write(stream, delta.text + row.text_at, row.nbytes, sent))
                stream.is_behind = true;
            if (stream.is_behind) rests.push_back({row.request, row.text_at, row.nbytes, sent});
        }
        if (row.ids == 0) return;
        StreamProgress& progress = stream.progress;
        double now = static_cast<double>(now_ns()) / 1e9;
        stream.counters->count(row.ids, now - progress.last);
        progress.last = now;
        progress.tokens += row.ids;
        const i32* ids = delta.numbers + row.id_at;
        if (stream.keeps_ids) progress.ids.insert(progress.ids.end(), ids, ids + row.ids);
    }

    // Returns whether the socket took the whole frame. Whatever else keeps it from that, the transport will meet, too.
    bool write(const Stream& stream, const char* text, u64 nbytes, u64& sent) {
        frame_.clear();
        if (stream.is_chunked) {
            char length[16];  // a hexadecimal digit for each half byte
            frame_.append(length, std::to_chars(length, std::end(length), nbytes, 16).ptr).append("\r\n");
        }
        frame_.append(text, nbytes);
        if (stream.is_chunked) frame_.append("\r\n");
        ssize_t taken = ::send(stream.fd, frame_.data(), frame_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        sent = taken < 0 ? 0 : static_cast<u64>(taken);
        return sent == frame_.size();
    }

    std::unordered_map<i32, Stream> streams_;
    std::string frame_;
};

}  // namespace penstock::engine
