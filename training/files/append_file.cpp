#include "training/files/append_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "base/path.h"

namespace train_gpt {

namespace {

std::filesystem::path folder_of(const std::filesystem::path& path) {
    return path.has_parent_path() ? path.parent_path() : ".";
}

/// The descriptor; negative if that failed.
int open_file(const std::filesystem::path& path) {
    return ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

}  // namespace

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
    // Open, so that no other folder gets its number while this one is compared with its path.
    folder_ = ::open(folder_of(path_).c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder_ >= 0) file_ = open_file(path_);
    if (file_ >= 0) return;
    const int code = errno;
    if (folder_ >= 0) ::close(folder_);
    throw Error("cannot write ", path_.string(), ": ", std::strerror(code),
                "; choose another run_dir");
}

AppendFile::~AppendFile() {
    ::close(file_);
    ::close(folder_);
}

void AppendFile::end_line() {
    const off_t size = ::lseek(file_, 0, SEEK_END);
    char last = '\n';
    if (size > 0 && ::pread(file_, &last, 1, size - 1) == 1 && last != '\n') append("\n");
}

/// Ends the writing where the file would no longer be in its folder, or would not be whole.
void AppendFile::keep_in_place() {
    if (leads_to(path_, file_)) return;
    std::error_code code;
    const bool is_free = !std::filesystem::exists(std::filesystem::symlink_status(path_, code));
    replaced_ = true;
    if (!is_free || !leads_to(folder_of(path_), folder_))
        throw Error(
            path_.string(),
            " is no longer the file that the run was writing: it, or a folder above it, was "
            "removed, renamed or replaced; put it back and run the same command again");
    write_again();
    replaced_ = false;
}

/// Copies what was written so far to a new file.
void AppendFile::write_again() {
    {
        AtomicFile copy(path_);
        std::vector<char> piece(1 << 20);
        off_t read = 0;
        for (ssize_t n; (n = ::pread(file_, piece.data(), piece.size(), read)) > 0; read += n)
            copy.write(std::string_view(piece.data(), static_cast<size_t>(n)));
        copy.commit();
    }
    const int again = open_file(path_);
    if (again < 0) throw Error("cannot write ", path_.string(), ": ", std::strerror(errno));
    ::close(std::exchange(file_, again));
    std::fprintf(stderr,
                 "warning: %s was removed or renamed while the run was writing it; it is there "
                 "again, with all that was in it\n",
                 printable(path_.string()).c_str());
}

bool AppendFile::append(std::string_view record, const char* lost) {
    if (replaced_) return false;
    keep_in_place();
    ::flock(file_, LOCK_EX | LOCK_NB);
    const off_t before = ::lseek(file_, 0, SEEK_END);
    const ssize_t written = ::write(file_, record.data(), record.size());
    if (written == static_cast<ssize_t>(record.size())) return true;
    const char* reason = written < 0 ? std::strerror(errno) : "the disk is full";
    // Programs that read the file would fail at half a record.
    const bool cut = written <= 0 || ::ftruncate(file_, before) == 0;
    if (!failed_)
        std::fprintf(stderr,
                     "warning: cannot write %s (%s); training continues, and %s until there is "
                     "space%s\n",
                     printable(path_.string()).c_str(), reason, lost,
                     cut ? "" : "; its end is incomplete");
    failed_ = true;
    return false;
}

}  // namespace train_gpt
