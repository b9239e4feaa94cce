#include "base/sha256.h"

#include <cstdio>
#include <string>

#include "base/error.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;

TEST_CASE("SHA-256 of the examples of FIPS 180-4", "[sha256]") {
    CHECK(sha256_of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(sha256_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(sha256_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(sha256_of("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmno"
                    "ijklmnopjklmnopqklmnopqrlmnopqrsmnopqrstnopqrstu") ==
          "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
    CHECK(sha256_of(std::string(1'000'000, 'a')) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("SHA-256 of random bytes, in pieces of random sizes, is that of sha256sum", "[sha256]") {
    const TemporaryDirectory directory;
    // All lengths around the ends of a block, and some long ones.
    for (int i = 0; i < 150; ++i) {
        const int64_t size = i < 140 ? i : random_int(1'000, 100'000);
        std::string bytes;
        for (int64_t b = 0; b < size; ++b) bytes += static_cast<char>(random_int(0, 255));
        Sha256 hash;
        for (size_t at = 0; at < bytes.size();) {
            const auto n = static_cast<size_t>(random_int(1, 200));
            hash.add(std::string_view(bytes).substr(at, n));
            at += n;
            if (at < bytes.size()) hash.digest();  // more bytes may follow
        }
        const std::string file = directory / std::to_string(i);
        write(file, bytes);
        CAPTURE(size);
        REQUIRE(hash.digest() == sha256_of(bytes));
        REQUIRE(hash.digest() == sha256_of_file(file));
    }
    const std::string command = "cd " + directory.path() + " && sha256sum *";
    std::FILE* sums = ::popen(command.c_str(), "r");
    char digest[65], name[16];
    int compared = 0;
    for (; std::fscanf(sums, "%64s %15s", digest, name) == 2; ++compared)
        CHECK(sha256_of_file(directory / name) == digest);
    ::pclose(sums);
    CHECK(compared == 150);
}
