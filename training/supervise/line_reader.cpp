#include "training/supervise/line_reader.h"

#include <array>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

namespace train_gpt {

namespace {

constexpr size_t longest_line = 1 << 20;

}  // namespace

LineReader::LineReader(int descriptor) : descriptor_(descriptor) {
    ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK);
}

LineReader::~LineReader() { close(); }

LineReader::LineReader(LineReader&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), text_(std::move(other.text_)) {}

LineReader& LineReader::operator=(LineReader&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(text_, other.text_);
    return *this;
}

void LineReader::close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
}

void LineReader::read_more() {
    std::array<char, 1 << 16> piece;
    while (descriptor_ >= 0 && text_.size() < longest_line) {
        const ssize_t n = ::read(descriptor_, piece.data(), piece.size());
        if (n > 0) {
            text_.append(piece.data(), static_cast<size_t>(n));
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            close();
        } else if (errno == EAGAIN) {
            return;
        }
    }
}

std::vector<std::string> LineReader::take() {
    read_more();
    std::vector<std::string> lines;
    size_t begin = 0;
    for (size_t end; (end = text_.find('\n', begin)) != std::string::npos; begin = end + 1)
        lines.push_back(text_.substr(begin, end - begin));
    text_.erase(0, begin);
    if (!text_.empty() && (descriptor_ < 0 || text_.size() >= longest_line))
        lines.push_back(std::exchange(text_, {}));
    return lines;
}

void LineReader::finish() {
    read_more();
    close();
}

std::string LineReader::wait_for_line() {
    for (;;) {
        read_more();
        const size_t end = text_.find('\n');
        if (end != std::string::npos || descriptor_ < 0) {
            const std::string line = text_.substr(0, end);
            text_.erase(0, end == std::string::npos ? end : end + 1);
            return line;
        }
        pollfd wait{descriptor_, POLLIN, 0};
        ::poll(&wait, 1, -1);
    }
}

}  // namespace train_gpt
