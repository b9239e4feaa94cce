#include "base/formatted.h"

#include <ctime>

namespace train_gpt {

std::string utc_time(int64_t seconds) {
    const std::time_t time = seconds;
    std::tm parts{};
    char text[64];
    if (!gmtime_r(&time, &parts) ||
        std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &parts) == 0)
        return "";
    return text;
}

}  // namespace train_gpt
