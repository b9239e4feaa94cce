#include "training/supervise/hosts.h"

#include <algorithm>
#include <charconv>
#include <sstream>

#include "base/error.h"
#include "base/file.h"

namespace train_gpt {

namespace {

constexpr int most_slots = 4096;

/// A number from 1 to most_slots; 0 if the text is something else.
int slots_from(const std::string& text) {
    int slots = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, code] = std::from_chars(text.data(), end, slots);
    return code == std::errc() && stop == end && slots >= 1 && slots <= most_slots ? slots : 0;
}

/// The words of a line without its comment. Blanks around "=" are left out.
std::vector<std::string> words_of(std::string line) {
    line.resize(std::min(line.find('#'), line.size()));
    std::string joined;
    for (size_t i = 0; i < line.size(); ++i) {
        const bool is_blank = line[i] == ' ' || line[i] == '\t' || line[i] == '\r';
        const size_t next = line.find_first_not_of(" \t\r", i);
        const bool before_equals = next != std::string::npos && line[next] == '=';
        const bool after_equals = !joined.empty() && joined.back() == '=';
        if (is_blank && (before_equals || after_equals)) continue;
        joined += is_blank ? ' ' : line[i];
    }
    return split_at_blanks(joined);
}

}  // namespace

std::vector<std::string> split_at_blanks(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> words;
    for (std::string word; stream >> word;) words.push_back(word);
    return words;
}

std::vector<JobHost> parse_hosts(const std::string& text, const std::string& file) {
    std::vector<JobHost> hosts;
    std::istringstream lines(text);
    int number = 0;
    for (std::string line; std::getline(lines, line);) {
        ++number;
        const std::vector<std::string> words = words_of(line);
        if (words.empty()) continue;
        const std::string place = concat("line ", number, " of ", file);
        JobHost host{.name = words[0], .address = ""};
        // It would be an option of ssh.
        if (host.name.starts_with('-') || host.name.find('=') != std::string::npos)
            throw Error(place, ": \"", host.name,
                        "\" is not the name of a host; a line is like \"node1 slots=8\"");
        for (size_t i = 1; i < words.size(); ++i) {
            const size_t equals = std::min(words[i].find('='), words[i].size());
            const std::string key = words[i].substr(0, equals);
            const std::string value =
                equals < words[i].size() ? words[i].substr(equals + 1) : std::string();
            if (key == "slots") {
                host.slots = slots_from(value);
                if (host.slots == 0)
                    throw Error(place, ": slots=", value, " is not a number of ranks from 1 to ",
                                most_slots);
            } else if (key == "address" && !value.empty()) {
                host.address = value;
            } else if (key != "max_slots" && key != "max-slots") {
                throw Error(place, ": \"", words[i],
                            "\" is neither slots=N nor address=NAME, which may follow the name of "
                            "a host");
            }
        }
        if (host.address.empty()) host.address = host.name;
        if (std::ranges::any_of(hosts, [&](const JobHost& h) { return h.name == host.name; }))
            throw Error(place, ": the host ", host.name,
                        " is there a second time; give it one line with all its slots");
        hosts.push_back(host);
    }
    if (hosts.empty())
        throw Error(file, " names no host; it needs a line such as \"node1 slots=8\" for each");
    return hosts;
}

std::vector<JobHost> read_hosts(const std::filesystem::path& file) {
    std::error_code code;
    if (!std::filesystem::exists(file, code))
        throw Error("there is no hosts file ", file.string(),
                    "; it needs a line such as \"node1 slots=8\" for each host");
    const MappedFile mapped(file);
    return parse_hosts(std::string(mapped.text()), file.string());
}

std::vector<JobHost> slurm_hosts(const Variables& variables) {
    const char* const list = variables("SLURM_JOB_NODELIST");
    if (!variables("SLURM_JOB_ID") || !list) return {};
    std::vector<JobHost> hosts;
    for (const std::string& name : expand_hosts(list)) hosts.push_back({name, 1, name});
    const char* tasks = variables("SLURM_TASKS_PER_NODE");
    if (!tasks) tasks = variables("SLURM_NTASKS_PER_NODE");
    if (!tasks) return hosts;
    // "8(x2),4": two nodes with eight tasks, and one with four
    std::vector<int> slots;
    std::istringstream parts(tasks);
    for (std::string part; std::getline(parts, part, ',');) {
        const size_t open = std::min(part.find("(x"), part.size());
        const int of_each = slots_from(part.substr(0, open));
        const int times =
            open == part.size() ? 1 : slots_from(part.substr(open + 2, part.size() - open - 3));
        if (of_each == 0 || times == 0)
            throw Error("SLURM_TASKS_PER_NODE is \"", tasks, "\", which is not like \"8(x2),4\"");
        slots.insert(slots.end(), static_cast<size_t>(times), of_each);
    }
    for (size_t i = 0; i < hosts.size() && !slots.empty(); ++i)
        hosts[i].slots = slots[std::min(i, slots.size() - 1)];
    return hosts;
}

bool is_this_machine(const std::string& name) {
    return name == "localhost" || name == "127.0.0.1" || name == "::1";
}

}  // namespace train_gpt
