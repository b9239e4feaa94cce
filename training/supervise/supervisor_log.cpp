#include "training/supervise/supervisor_log.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/error.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "training/files/history_chain.h"

namespace train_gpt {

namespace {

constexpr const char* lost = "the supervisor's records have gaps";

std::string time_now() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    ::gmtime_r(&now, &parts);
    char text[32];
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
    return text;
}

}  // namespace

SupervisorLog::SupervisorLog(const std::filesystem::path& run_dir) : run_dir_(run_dir) {
    const std::filesystem::path file = run_dir / "supervise.lock";
    lock_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (lock_ < 0)
        throw Error("cannot write into the run folder ", run_dir.string(), ": ",
                    std::strerror(errno), "; choose another run_dir");
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
        ::close(lock_);
        throw Error("another supervisor runs the job in ", run_dir.string(),
                    "; wait for it, stop it, or choose another folder with --set run_dir=…");
    }
    try {
        log_.emplace(run_dir / supervisor_log_file);
        events_.emplace(run_dir / supervisor_events_file);
        log_->end_line();
        events_->end_line();
    } catch (const Error&) {
        ::close(lock_);
        throw;
    }
}

SupervisorLog::~SupervisorLog() { ::close(lock_); }

void SupervisorLog::line(const std::string& text) { log_->append(text + '\n', lost); }

void SupervisorLog::say(const std::string& text) {
    print_line(stderr, "train_gpt supervise: " + printable_line(text));
    line(concat(time_now(), " supervise: ", text));
}

void SupervisorLog::record(const char* event, const std::string& text, const Json& fields) {
    say(text);
    Json json = {{"event", event},
                 {"step", last_recorded_step(run_dir_)},
                 {"time", static_cast<int64_t>(std::time(nullptr))},
                 {"text", text}};
    json.update(fields);
    events_->append(to_text(json) + '\n', lost);
    add_to_history(json);
}

void SupervisorLog::add_to_history(const Json& event) {
    if (!std::filesystem::exists(run_dir_ / history_file)) return;
    not_in_history_.push_back(event);
    try {
        while (!not_in_history_.empty()) {
            append_to_history(run_dir_, not_in_history_.front());
            not_in_history_.erase(not_in_history_.begin());
        }
    } catch (const Error& error) {
        line(concat(time_now(), " supervise: ", not_in_history_.size(),
                    " of these events are not in the run's history yet: ", error.what()));
    }
}

int64_t last_recorded_step(const std::filesystem::path& run_dir) {
    constexpr std::streamoff tail = 1 << 16;  // more than a line has
    std::ifstream file(run_dir / "metrics.jsonl", std::ios::binary | std::ios::ate);
    if (!file) return 0;
    const std::streamoff size = file.tellg();
    file.seekg(std::max<std::streamoff>(0, size - tail));
    int64_t step = 0;
    for (std::string line; std::getline(file, line);)
        if (const Json json = try_parse_json(line);
            json.is_object() && json.contains("step") && json["step"].is_number_integer())
            step = json["step"].get<int64_t>();
    return step;
}

}  // namespace train_gpt
