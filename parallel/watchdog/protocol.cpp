#include "parallel/watchdog/protocol.h"

#include <algorithm>
#include <cstring>

#include "parallel/net/socket.h"

namespace train_gpt::watchdog {

bool equal(const Key& a, const Key& b) {
    const auto text = [](const Key& key) {
        return std::string_view(reinterpret_cast<const char*>(key.data()), key.size());
    };
    return net::equal_secrets(text(a), text(b));
}

Message& Message::number(int64_t value) {
    for (int i = 0; i < 8; ++i)
        bytes_[size_++] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> 8 * i);
    return *this;
}

Message& Message::append(const void* data, size_t size) {
    std::memcpy(bytes_.data() + size_, data, size);
    size_ += size;
    return *this;
}

int64_t Fields::number() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= static_cast<uint64_t>(*at_++) << 8 * i;
    return static_cast<int64_t>(value);
}

Key Fields::key() {
    Key key;
    std::copy_n(at_, key.size(), key.data());
    at_ += key.size();
    return key;
}

ActivityReport report_of(const Activity& activity) {
    return {activity.pulses.load(std::memory_order_relaxed),
            activity.step.load(std::memory_order_relaxed),
            activity.collectives.load(std::memory_order_relaxed),
            Name(activity.collective.load(std::memory_order_relaxed)),
            Name(activity.phase.load(std::memory_order_relaxed))};
}

Message heartbeat(const ActivityReport& report) {
    Message message(Kind::heartbeat);
    message.number(report.pulses).number(report.step).number(report.collectives);
    message.text(report.collective).text(report.phase);
    return message;
}

ActivityReport parse_report(Fields fields) {
    ActivityReport report;
    report.pulses = fields.number();
    report.step = fields.number();
    report.collectives = fields.number();
    report.collective = fields.text<Name>();
    report.phase = fields.text<Name>();
    return report;
}

}  // namespace train_gpt::watchdog
