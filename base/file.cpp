#include "base/file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hub_files.h"
#include "base/path.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

[[noreturn]] void fail(const char* what, const fs::path& path, int code) {
    if (code == ENOENT || code == ELOOP)
        if (const std::string link = describe_broken_link(path); !link.empty())
            throw Error(what, " ", path.string(), ": ", link, "; restore it or remove the link");
    const char* advice = code == ENOENT   ? "; check the path"
                         : code == EACCES ? "; check the permissions"
                         : code == ENOSPC ? "; free some space and run the same command again"
                         : code == EROFS  ? "; choose a writable folder"
                                          : "";
    throw Error(what, " ", path.string(), ": ", std::strerror(code), advice);
}

}  // namespace

MappedFile::MappedFile(const fs::path& path) : path_(path) {
    // Opening a named pipe would wait for one who writes.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail("cannot read", path, errno);
    struct stat status {};
    if (::fstat(fd, &status) != 0) {
        const int code = errno;
        ::close(fd);
        fail("cannot read", path, code);
    }
    if (!S_ISREG(status.st_mode)) {
        ::close(fd);
        throw Error(path.string(),
                    S_ISDIR(status.st_mode) ? " is a directory" : " is not a regular file",
                    ", but a file belongs here; check the path");
    }
    size_ = static_cast<size_t>(status.st_size);
    if (size_ > 0) {
        void* mapping = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
        const int code = errno;
        ::close(fd);
        if (mapping == MAP_FAILED) fail("cannot map", path, code);
        data_ = static_cast<const std::byte*>(mapping);
        if (size_ < 1024) refuse_lfs_pointer(path, text());
    } else {
        ::close(fd);
    }
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

AtomicFile::AtomicFile(fs::path path)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
    if (fs::is_directory(path_))
        throw Error(path_.string(),
                    " is a directory, but a file is to be written here; choose another name");
    if (fs::exists(path_) && !fs::is_regular_file(path_))
        throw Error(
            path_.string(),
            " is a device or a pipe, but a file is to be written here; choose another name");
    file_ = std::fopen(temporary_.c_str(), "wb");
    if (!file_) fail("cannot write", temporary_, errno);
}

AtomicFile::AtomicFile(fs::path path, uint64_t size)
    : path_(std::move(path)),
      temporary_(path_.string() + ".tmp"),
      size_(size),
      flushed_(size),
      stays_(true) {
    if (!fs::exists(temporary_)) ::rename(path_.c_str(), temporary_.c_str());
    std::error_code code;
    const uintmax_t there = fs::file_size(temporary_, code);
    if (code) fail("cannot continue", temporary_, code.value());
    if (there < size)
        throw Error("cannot continue ", temporary_.string(), ": it has ", there, " bytes, but ",
                    size, " were written; remove it and start again");
    file_ = std::fopen(temporary_.c_str(), "r+b");
    if (!file_ || ::ftruncate(::fileno(file_), static_cast<off_t>(size)) != 0 ||
        std::fseek(file_, 0, SEEK_END) != 0) {
        const int reason = errno;
        if (file_) std::fclose(file_);
        fail("cannot write", temporary_, reason);
    }
}

AtomicFile::~AtomicFile() {
    if (!file_) return;
    std::fclose(file_);
    if (!stays_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) {
    if (std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size())
        fail("cannot write", path_, errno);
    size_ += bytes.size();
    constexpr uint64_t most_unwritten = 1 << 30;
    if (size_ - flushed_ < most_unwritten) return;
    flush();
    flushed_ = size_;
}

void AtomicFile::flush() {
    if (std::fflush(file_) != 0 || ::fsync(::fileno(file_)) != 0)
        fail("cannot write", path_, errno);
}

void AtomicFile::write_at(uint64_t offset, std::span<const std::byte> bytes) {
    if (std::fseek(file_, static_cast<long>(offset), SEEK_SET) != 0 ||
        std::fwrite(bytes.data(), 1, bytes.size(), file_) != bytes.size() ||
        std::fseek(file_, 0, SEEK_END) != 0)
        fail("cannot write", path_, errno);
}

void AtomicFile::sync() {
    flush();
    stays_ = true;
}

void AtomicFile::commit() {
    sync();
    if (std::fclose(std::exchange(file_, nullptr)) != 0) {
        const int code = errno;
        ::unlink(temporary_.c_str());
        fail("cannot write", path_, code);
    }
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
        const int code = errno;
        ::unlink(temporary_.c_str());
        fail("cannot write", path_, code);
    }
}

void write_file(const fs::path& path, std::string_view text) {
    AtomicFile file(path);
    file.write(text);
    file.commit();
}

void sync_file(const fs::path& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ::fsync(fd);
    ::close(fd);
}

void sync_directory(const fs::path& directory) {
    const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) fail("cannot open", directory, errno);
    const int result = ::fsync(fd);
    const int code = errno;
    ::close(fd);
    if (result != 0 && code != EINVAL) fail("cannot flush", directory, code);
}

std::vector<fs::path> glob_files(const std::string& pattern) {
    glob_t matches{};
    const int result = ::glob(pattern.c_str(), 0, nullptr, &matches);
    std::vector<fs::path> files;
    for (size_t i = 0; result == 0 && i < matches.gl_pathc; ++i)
        files.emplace_back(matches.gl_pathv[i]);
    ::globfree(&matches);
    if (files.empty()) {
        if (const std::string link = describe_broken_link(pattern); !link.empty())
            throw Error(link, "; restore it or remove the link");
        struct stat status {};
        const bool is_locked =
            (::stat(pattern.c_str(), &status) != 0 && errno == EACCES) ||
            (::glob(pattern.c_str(), GLOB_ERR, nullptr, &matches) == GLOB_ABORTED &&
             errno == EACCES);
        ::globfree(&matches);
        if (is_locked)
            throw Error("a folder of \"", pattern, "\" may not be read; check its permissions");
        throw Error("no file matches \"", pattern, "\"; check the path or the pattern",
                    pattern.find('[') == std::string::npos
                        ? ""
                        : " (where [ is itself part of a name, write [[])");
    }
    for (const auto& file : files) {
        std::error_code code;
        if (fs::is_regular_file(file, code)) continue;
        if (const std::string link = describe_broken_link(file); !link.empty())
            throw Error(link, "; restore it or remove the link");
        throw Error(file.string(), " is not a regular file, but \"", pattern,
                    "\" must match files only; narrow the pattern");
    }
    std::sort(files.begin(), files.end());
    return files;
}

void make_directory(const fs::path& directory) {
    std::error_code code;
    fs::create_directories(directory, code);
    if (code || !fs::is_directory(directory))
        throw Error("cannot make the folder ", directory.string(), ": ",
                    code ? code.message() : "a file of that name is in the way",
                    "; choose another folder");
}

}  // namespace train_gpt
