// sha256.cpp: what the standard says of two texts, and the processor's instructions say what the portable code says, of
// any length, given in any pieces.
//
//   sha256                      20,000 texts
//   sha256 --quick              2,000
#include "sha256.h"

#include "tests/testing.h"

using namespace testing;
using namespace penstock::engine;

namespace {

std::string hex(const Digest& digest) {
    std::string out;
    for (u8 byte : digest) out += format("%02x", byte);
    return out;
}

void require_known(bool is_portable) {
    const std::pair<std::string, const char*> known[] = {
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    };
    for (const auto& [text, digest] : known) {
        Sha256 hash(is_portable);
        hash.add(text.data(), text.size());
        REQUIRE(hex(hash.digest()) == digest, "of '%s'", text.c_str());
    }
}

}  // namespace

int main(int argc, char** argv) {
    Arguments arguments(argc, argv);
    require_known(true);
    require_known(!has_sha_instructions());
    Random random(arguments.seed);
    for (u64 left = arguments.is_quick ? 2'000 : 20'000; left != 0; --left) {
        std::string text(random.below(300), 0);
        for (char& one : text) one = static_cast<char>(random.next());
        Sha256 portable(true), fast;
        portable.add(text.data(), text.size());
        for (u64 at = 0; at < text.size();) {
            u64 piece = std::min<u64>(text.size() - at, 1 + random.below(100));
            fast.add(text.data() + at, piece);
            at += piece;
        }
        REQUIRE(portable.digest() == fast.digest(), "%zu bytes, seed %" PRIu64, text.size(), arguments.seed);
    }
    std::printf("as the standard says%s\n", has_sha_instructions() ? ", by both ways" : "");
    return 0;
}
