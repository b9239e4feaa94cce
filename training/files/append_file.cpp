#include "training/files/append_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "base/error.h"

namespace train_gpt {

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
    file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file_ < 0)
        throw Error("cannot write ", path_.string(), ": ", std::strerror(errno),
                    "; choose another run_dir");
}

AppendFile::~AppendFile() { ::close(file_); }

void AppendFile::end_line() {
    const off_t size = ::lseek(file_, 0, SEEK_END);
    char last = '\n';
    if (size > 0 && ::pread(file_, &last, 1, size - 1) == 1 && last != '\n') append("\n");
}

void AppendFile::append(std::string_view record, const char* lost) {
    const off_t before = ::lseek(file_, 0, SEEK_END);
    const ssize_t written = ::write(file_, record.data(), record.size());
    if (written == static_cast<ssize_t>(record.size())) return;
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
}

}  // namespace train_gpt
