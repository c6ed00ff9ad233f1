// crc32c.cpp: known CRC-32Cs, and each kernel against bit by bit, at every length around its runs.
//
//   crc32c                      2,000 random buffers
//   crc32c --quick              200
#include "crc32c.h"

#include "testing.h"

using namespace testing;
using namespace penstock::crc32c;

namespace {

using Kernel = u32 (*)(u32, const u8*, u64);

u32 extend_bit_by_bit(u32 crc, const u8* at, u64 nbytes) {
    for (; nbytes != 0; ++at, --nbytes) {
        crc ^= *at;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? POLYNOMIAL : 0);
    }
    return crc;
}

std::vector<std::pair<const char*, Kernel>> kernels() {
    std::vector<std::pair<const char*, Kernel>> all = {{"table", extend_by_table}};
#if PENSTOCK_HAS_CRC32C
    if (has_instruction()) all.push_back({"instruction", extend_by_instruction});
#endif
    return all;
}

std::vector<u8> counted(u64 nbytes, int first, int step) {
    std::vector<u8> bytes(nbytes);
    for (u64 i = 0; i < nbytes; ++i) bytes[i] = static_cast<u8>(first + step * static_cast<int>(i));
    return bytes;
}

// RFC 3720 B.4, and the check value of the catalogue of CRCs.
void known_vectors_have_their_crc() {
    const char* digits = "123456789";
    const std::pair<std::vector<u8>, u32> cases[] = {
        {{}, 0},
        {std::vector<u8>(32, 0), 0x8a9136aa},
        {std::vector<u8>(32, 0xff), 0x62a8ab43},
        {counted(32, 0, 1), 0x46dd794e},
        {counted(32, 31, -1), 0x113fdb5c},
        {std::vector<u8>(digits, digits + 9), 0xe3069283},
    };
    for (const auto& [bytes, crc] : cases) {
        REQUIRE(compute(bytes.data(), bytes.size()) == crc, "%08x", crc);
        for (auto [name, kernel] : kernels())
            REQUIRE(~kernel(~0u, bytes.data(), bytes.size()) == crc, "%08x by %s", crc, name);
    }
}

void require_equal(const u8* at, u64 nbytes, u32 before) {
    u32 expected = extend_bit_by_bit(before, at, nbytes);
    for (auto [name, kernel] : kernels())
        REQUIRE(kernel(before, at, nbytes) == expected, "%s, %" PRIu64 " bytes", name, nbytes);
}

void kernels_agree_at_every_length_around_their_runs(Random& random) {
    std::vector<u8> bytes(6 * RUN_NBYTES + 64);
    for (u8& byte : bytes) byte = static_cast<u8>(random.next());
    for (u64 runs : {u64{0}, 3 * RUN_NBYTES, 6 * RUN_NBYTES})
        for (u64 nbytes = runs < 9 ? 0 : runs - 9; nbytes < runs + 17; ++nbytes)
            for (u64 offset : {u64{0}, u64{1}, u64{7}}) require_equal(bytes.data() + offset, nbytes, ~0u);
}

void random_buffers_have_one_crc_however_they_are_cut(Random& random, u64 count) {
    for (u64 i = 0; i < count; ++i) {
        std::vector<u8> bytes(random.below(1 << random.below(16)));
        for (u8& byte : bytes) byte = static_cast<u8>(random.next());
        require_equal(bytes.data(), bytes.size(), static_cast<u32>(random.next()));
        u64 cut = random.below(bytes.size() + 1);
        u32 first = compute(bytes.data(), cut);
        u32 whole = compute(bytes.data(), bytes.size());
        REQUIRE(compute(bytes.data() + cut, bytes.size() - cut, first) == whole, "cut at %" PRIu64, cut);
    }
}

// A CRC of 32 bits notices each change of one bit: the promise that a link is built on.
void each_flipped_bit_changes_the_crc() {
    std::vector<u8> bytes = counted(3'085, 5, 7);
    u32 crc = compute(bytes.data(), bytes.size());
    for (u64 bit = 0; bit < 8 * bytes.size(); ++bit) {
        bytes[bit / 8] ^= static_cast<u8>(1 << bit % 8);
        REQUIRE(compute(bytes.data(), bytes.size()) != crc, "bit %" PRIu64, bit);
        bytes[bit / 8] ^= static_cast<u8>(1 << bit % 8);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    Random random(arguments.seed);
    std::printf("seed %" PRIu64 "\n", arguments.seed);
    known_vectors_have_their_crc();
    kernels_agree_at_every_length_around_their_runs(random);
    random_buffers_have_one_crc_however_they_are_cut(random, (arguments.is_quick ? 200 : 2'000) * arguments.scale);
    each_flipped_bit_changes_the_crc();
    return 0;
}
