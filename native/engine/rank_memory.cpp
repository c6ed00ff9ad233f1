// rank_memory.cpp: how a rank waits for the other ranks, and adds up their numbers.
#define PENSTOCK_LANES 4
#include "rank_memory.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "errors.h"
#include "vector_elements.h"

namespace penstock::engine {
namespace {

constexpr u64 NS_OF_A_SECOND = 1'000'000'000;

template <class Type>
void add_up(void* out, const u8* parts, u64 ranks, u64 count) {
    using Element = typename Type::Element;
    Element* to = static_cast<Element*>(out);
    for (u64 at = 0; at < count; at += LANES) {
        Floats total{};
        for (u64 rank = 0; rank < ranks; ++rank) {
            const u8* part = parts + rank * RankMemory::PART_NBYTES;
            Floats numbers = load_part<Type>(reinterpret_cast<const Element*>(part), at, count);
            total = rank == 0 ? numbers : total + numbers;
        }
        store_part<Type>(to, at, count, total);
    }
}

}  // namespace

void RankMemory::sum(void* numbers, u64 count, DType dtype) {
    u64 width = dtype == DType::float32 ? sizeof(float) : sizeof(u16);
    for (u64 first = 0; first == 0 || first < count; first += PART_NBYTES / width) {
        u8* own = static_cast<u8*>(numbers) + first * width;
        u64 some = std::min(count - first, PART_NBYTES / width);
        exchange(own, some * width);
        if (dtype == DType::float32)
            add_up<Float32>(own, part(0), ranks_, some);
        else
            add_up<Bfloat16>(own, part(0), ranks_, some);
    }
}

void RankMemory::gather(const void* bytes, u64 rows, u64 nbytes, void* out) {
    for (u64 first = 0; first < rows * nbytes; first += PART_NBYTES) {
        u64 end = std::min(rows * nbytes, first + PART_NBYTES);
        exchange(static_cast<const u8*>(bytes) + first, end - first);
        for (u64 rank = 0; rank < ranks_; ++rank)
            for (u64 at = first, some = 0; at < end; at += some) {  // what is left of a row
                some = std::min(end - at, nbytes - at % nbytes);
                u64 place = (at / nbytes * ranks_ + rank) * nbytes + at % nbytes;
                std::memcpy(static_cast<u8*>(out) + place, part(rank) + (at - first), some);
            }
    }
}

void RankMemory::exchange(const void* bytes, u64 nbytes) {
    Row& row = rows_[rank_];
    ++number_;
    if (nbytes != 0) std::memcpy(part(rank_), bytes, nbytes);
    row.cpu.store(current_cpu(), RELAXED);
    row.written.store(number_, order::ranks.release);
    ring(row.bell, nullptr, INT_MAX);
    for (u64 rank = 0; rank < ranks_; ++rank)
        if (rank != rank_) await(rank);
}

void RankMemory::await(u64 rank) {
    Row& row = rows_[rank];
    auto is_written = [&] { return row.written.load(order::ranks.acquire) >= number_; };
    if (is_written()) return;
    u64 deadline = now_ns() + TIMEOUT_NS;
    for (;;) {
        Woken woken = wait(row.bell, u64{1} << rank_, deadline, spinner_, waits_, &row.cpu, is_written);
        if (woken == Woken::ready) return;
        if (woken == Woken::deadline)
            throw std::runtime_error(format("expected rank %llu of the model to compute its part within %llu s",
                                            (unsigned long long)rank,
                                            (unsigned long long)(TIMEOUT_NS / NS_OF_A_SECOND)));
        require_alive(rank);
        if (is_written()) return;
    }
}

// A rank that ended may have written before.
void RankMemory::require_alive(u64 rank) const {
    pollfd process{rank < pidfds_.size() ? pidfds_[rank] : -1, POLLIN, 0};
    if (::poll(&process, 1, 0) == 1 && rows_[rank].written.load(order::ranks.acquire) < number_)
        throw std::runtime_error(format("rank %llu of the model ended in a step", (unsigned long long)rank));
}

}  // namespace penstock::engine
