#include "base/file.h"

#include <filesystem>

#include <sys/stat.h>

#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

TEST_CASE("a file is not written over a device, a pipe or a folder") {
    const TemporaryDirectory folder;
    const fs::path pipe = fs::path(folder.path()) / "pipe", file = fs::path(folder.path()) / "file";
    REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
    CHECK(contains(error_of([&] { write_file(pipe, "text"); }), "is a device or a pipe"));
    CHECK(fs::is_fifo(pipe));
    CHECK(contains(error_of([&] { write_file(folder.path(), "text"); }), "is a directory"));
    CHECK_FALSE(fs::exists(pipe.string() + ".tmp"));
    for (const char* text : {"one", "two"}) {
        write_file(file, text);
        CHECK(read(file) == text);
    }
}
