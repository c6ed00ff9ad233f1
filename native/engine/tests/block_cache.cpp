// block_cache.cpp: publishing a block allocates memory for that block alone, however many are published by then. A
// table that grows while it is filled is rehashed whole: with a million blocks that held the core up for 120 ms.
//
//   block_cache                 100,000 blocks
//   block_cache --quick         5,000
#include "block_cache.h"

#include <cstdlib>
#include <new>

#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

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
    const u32 num_blocks = arguments.is_quick ? 5'000 : 100'000;
    BlockCache cache(num_blocks);
    std::vector<i32> blocks(num_blocks);
    REQUIRE(cache.take(num_blocks, blocks.data()), "%u blocks", num_blocks);
    BlockHash hash{};
    largest = 0;
    for (u32 block = 0; block < num_blocks; ++block) {
        std::memcpy(hash.data(), &block, sizeof block);
        REQUIRE(cache.publish(block, hash), "block %u", block);
    }
    const std::size_t max = largest;
    REQUIRE(max < 256, "%zu bytes at once", max);
    u32 block = 0;
    REQUIRE(cache.find(hash, block) && block == num_blocks - 1, "block %u", block);
    const char* broken = cache.broken_invariant();
    REQUIRE(broken == nullptr, "%s", broken);
    std::printf("%u blocks, %zu bytes at most for one\n", num_blocks, max);
    return 0;
}
