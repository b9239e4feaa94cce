#include "parallel/watchdog/text.h"

#include <cstdarg>
#include <cstdio>

#include <poll.h>
#include <unistd.h>

namespace train_gpt::watchdog {

Line line(const char* format, ...) {
    std::array<char, 1024> chars;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(chars.data(), chars.size(), format, arguments);
    va_end(arguments);
    return Line(chars.data());
}

void print(const Line& text) {
    std::array<char, 1100> out;
    const int length = std::snprintf(out.data(), out.size(), "train_gpt: %s\n", text.c_str());
    pollfd error_output{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&error_output, 1, 1000) != 1) return;
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, out.data(), static_cast<size_t>(length));
}

}  // namespace train_gpt::watchdog
