// Paths as users write them, links that lead to nothing, and what stands in the place of a file.
#include "base/path.h"

#include <cstdlib>
#include <filesystem>
#include <optional>

#include "base/file.h"
#include "base/hub_files.h"
#include "test/catch.h"
#include "test/random.h"
#include "test/text.h"

using namespace train_gpt;
namespace fs = std::filesystem;

namespace {

/// Sets or unsets HOME until it is destroyed.
class Home {
  public:
    explicit Home(const char* path) {
        if (const char* before = std::getenv("HOME")) before_ = before;
        path ? ::setenv("HOME", path, 1) : ::unsetenv("HOME");
    }
    ~Home() { before_ ? ::setenv("HOME", before_->c_str(), 1) : ::unsetenv("HOME"); }

  private:
    std::optional<std::string> before_;
};

}  // namespace

TEST_CASE("a path of ~ or after it is in the home folder, and ~NAME is refused") {
    const Home home("/home/some one");
    CHECK(expand_home("~") == "/home/some one");
    CHECK(expand_home("~/") == "/home/some one/");
    CHECK(expand_home("~/a/~/*.bin") == "/home/some one/a/~/*.bin");
    for (const char* as_it_is : {"", "-", "a~", "./~", "/~/b", " ~/b", "a/~b"})
        CHECK(expand_home(as_it_is) == as_it_is);
    for (const std::string other : {"~root", "~root/a.txt", "~~", "~a.txt"}) {
        const std::string message = error_of([&] { expand_home(other); });
        CHECK(contains(message, other.substr(0, other.find('/'))));
        CHECK(contains(message, "./" + other));
    }
    for (const char* missing : {static_cast<const char*>(nullptr), ""}) {
        const Home none(missing);  // the user database has it
        CHECK(expand_home("~/a").starts_with("/"));
        CHECK(expand_home("~/a").ends_with("/a"));
    }
}

TEST_CASE("links that lead to nothing or to themselves are named, with what they lead to") {
    const TemporaryDirectory folder;
    write(folder / "there", "x");
    fs::create_directory(folder / "sub");
    const auto link = [&](const std::string& to, const std::string& name) {
        fs::create_symlink(to, folder / name);
        return folder / name;
    };
    link("there", "good");
    const std::string gone = link("gone", "dangling"), self = link("self", "self");
    link("dangling", "chain");
    link("b", "a");
    link("a", "b");
    link("../gone", "sub/up");
    link("none", "folder");
    CHECK(contains(describe_broken_link(gone), "dangling symbolic link"));
    for (const char* name : {"dangling", "chain", "sub/up"})
        CHECK(fs::path(folder / "gone") == [text = describe_broken_link(folder / name)] {
            const size_t at = text.find("target ") + 7;
            return fs::path(text.substr(at, text.find(" does not") - at)).lexically_normal();
        }());
    CHECK(describe_broken_link(folder / "folder/a/b.txt").starts_with(folder / "folder is a"));
    for (const char* name : {"self", "a", "b"})
        CHECK(describe_broken_link(folder / name) ==
              (folder / name) + " is a symbolic link that leads back to itself");
    for (const char* name : {"there", "good", "missing", "missing/a", "there/a"})
        CHECK(describe_broken_link(folder / name) == "");
    // Whoever opens a file or matches a pattern says so.
    CHECK(contains(error_of([&] { MappedFile file(gone); }), "dangling symbolic link"));
    CHECK(contains(error_of([&] { MappedFile file(self); }), "leads back to itself"));
    CHECK(contains(error_of([&] { glob_files(gone); }), "dangling symbolic link"));
    CHECK(contains(error_of([&] { glob_files(folder / "dang*"); }), "dangling symbolic link"));
    CHECK(contains(error_of([&] { glob_files(folder / "sel*"); }), "leads back to itself"));
}

TEST_CASE("a Git LFS pointer and the root of a Hugging Face cache are named") {
    const TemporaryDirectory folder;
    write(folder / "model.safetensors",
          "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n");
    const std::string pointer = error_of([&] { MappedFile file(folder / "model.safetensors"); });
    CHECK(contains(pointer, (folder / "model.safetensors") + " is a Git LFS pointer"));
    CHECK(contains(pointer, "git lfs pull"));
    write(folder / "about.txt", "A pointer begins: version https://git-lfs.github.com/spec/v1\n");
    CHECK(error_of([&] { MappedFile file(folder / "about.txt"); }) == "");

    const std::string root = folder / "hub/models--a--b";
    const auto refused = [](const std::string& name) {
        return error_of([&] { refuse_cache_root(name); });
    };
    fs::create_directories(root + "/blobs");
    fs::create_directories(root + "/snapshots");
    CHECK(contains(refused(root), root + " is the root of a Hugging Face cache"));
    CHECK(contains(refused(root), "download the files again"));
    fs::create_directories(root + "/snapshots/1aa");
    fs::create_directories(root + "/snapshots/2bb");
    CHECK(contains(refused(root), "name a snapshot in it: " + root + "/snapshots/1aa"));
    fs::create_directories(root + "/refs");
    write(root + "/refs/main", "2bb");
    CHECK(contains(refused(root), "name a snapshot in it: " + root + "/snapshots/2bb"));
    CHECK(contains(refused(folder / "hub"), "such as " + root + "/snapshots/2bb"));
    CHECK(contains(refused(folder.path()), "such as " + root + "/snapshots/2bb"));
    CHECK(contains(refused(root + "/snapshots"), "name a snapshot in it: " + root));
    for (const std::string& usable : {root + "/snapshots/2bb", root + "/refs", folder / "missing"})
        CHECK(refused(usable) == "");
}
