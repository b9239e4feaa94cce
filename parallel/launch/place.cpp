#include "parallel/launch/place.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>

#include <arpa/inet.h>

#include "base/error.h"

namespace train_gpt {

namespace {

// Rank 0 takes another port where a foreign program has the first one.
constexpr int spare_ports = 8;

std::optional<int64_t> parse_number(const std::string& text) {
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) return {};
    return number;
}

/// Reads the variables of one launcher.
class Reader {
  public:
    Reader(const Variables& variables, std::string launcher)
        : variables_(variables), launcher_(std::move(launcher)) {}

    std::string text(const std::string& name) const {
        const char* value = variables_(name);
        if (!value || !*value)
            throw Error("this process was started as one of several ranks (", launcher_, "), but ",
                        name,
                        " is not set; see docs/many-ranks.md for the variables that it needs");
        return value;
    }
    int number(const std::string& name, int64_t low, int64_t high) const {
        const std::string value = text(name);
        const std::optional<int64_t> number = parse_number(value);
        if (!number || *number < low || *number > high)
            throw Error(name, " is \"", value, "\", but must be a whole number from ", low, " to ",
                        high);
        return static_cast<int>(*number);
    }

  private:
    const Variables& variables_;
    std::string launcher_;
};

constexpr int most_ranks = 1 << 20;

Place place_of(const Reader& read, const std::string& launcher, const std::string& rank,
               const std::string& size) {
    Place place;
    place.through = Place::Through::tcp;
    place.launcher = launcher;
    place.variable = rank;
    place.size = read.number(size, 1, most_ranks);
    place.rank = read.number(rank, 0, place.size - 1);
    return place;
}

/// The host in "node1", "10.0.0.1", "fd00::1" or "[fd00::1]"; nothing in texts that are no host.
std::optional<std::string> parse_host(const std::string& text) {
    const bool bracketed = text.starts_with('[') && text.ends_with(']') && text.size() > 2;
    const std::string host = bracketed ? text.substr(1, text.size() - 2) : text;
    in6_addr address{};
    const bool is_ipv6 =
        ::inet_pton(AF_INET6, host.substr(0, host.find('%')).c_str(), &address) == 1;
    const bool is_name = host.find_first_of(":[]/ \t") == std::string::npos && !host.empty();
    if (bracketed ? !is_ipv6 : !is_ipv6 && !is_name) return {};
    return host;
}

/// "host:port", "[address]:port"
void set_address(Place& place, const std::string& address) {
    const size_t colon = address.rfind(':');
    const std::string text = address.substr(0, colon == std::string::npos ? 0 : colon);
    const std::optional<std::string> host = parse_host(text);
    const int64_t port =
        colon == std::string::npos ? 0 : parse_number(address.substr(colon + 1)).value_or(0);
    const bool needs_brackets = text.find(':') != std::string::npos && !text.starts_with('[');
    if (!host || needs_brackets || port < 1 || port > 65535)
        throw Error("TRAIN_GPT_ADDRESS is \"", address,
                    "\", but must be rank 0's host and a free port there, such as node1:29500 or "
                    "[fd00::1]:29500");
    place.host = *host;
    place.host_from = "TRAIN_GPT_ADDRESS";
    place.ports = {static_cast<int>(port)};
}

/// Ports that follow `first`, in a circle below 65536.
std::vector<int> ports_from(int first) {
    std::vector<int> ports;
    for (int i = 0; i < spare_ports; ++i)
        ports.push_back(first + i <= 65535 ? first + i : first + i - 65536 + 1024);
    return ports;
}

Place place_of_torchrun(const Variables& variables) {
    const Reader read(variables, "RANK and WORLD_SIZE, as torchrun sets them");
    Place place = place_of(read, "torchrun", "RANK", "WORLD_SIZE");
    if (place.size == 1) return place;
    const std::string address = read.text("MASTER_ADDR");
    const std::optional<std::string> host = parse_host(address);
    if (!host)
        throw Error("MASTER_ADDR is \"", address,
                    "\", but must be the name or address of rank 0's host without a port, such as "
                    "node1, 10.0.0.1 or fd00::1; the port is MASTER_PORT");
    place.host = *host;
    place.host_from = "MASTER_ADDR";
    const int port = read.number("MASTER_PORT", 1, 65535);
    // torchrun itself listens on this port, except where it says otherwise.
    const char* taken = variables("TORCHELASTIC_USE_AGENT_STORE");
    if (taken && std::string(taken) == "True")
        place.ports = ports_from(port == 65535 ? 1024 : port + 1);
    else
        place.ports = {port};
    for (const char* name : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"})
        if (const char* value = variables(name)) place.job += concat(" ", name, "=", value);
    if (const char* local = variables("LOCAL_WORLD_SIZE"); local && *local)
        place.ranks_per_node = read.number("LOCAL_WORLD_SIZE", 1, most_ranks);
    return place;
}

Place place_of_own(const Variables& variables) {
    const Reader read(variables, "TRAIN_GPT_RANK and TRAIN_GPT_WORLD");
    Place place = place_of(read, "TRAIN_GPT_RANK", "TRAIN_GPT_RANK", "TRAIN_GPT_WORLD");
    if (place.size == 1) return place;
    set_address(place, read.text("TRAIN_GPT_ADDRESS"));
    return place;
}

/// Slurm's own steps, of which a batch script and an interactive shell are part, have the highest
/// numbers.
constexpr int64_t last_step = 0xffffffef;

bool is_in_step(const Variables& variables) {
    const char* step = variables("SLURM_STEP_ID");
    if (!step) return variables("SLURM_STEP_NUM_TASKS");
    const std::optional<int64_t> number = parse_number(step);
    return number && *number >= 0 && *number <= last_step;
}

Place place_of_slurm(const Variables& variables) {
    const Reader read(variables, "a step of Slurm");
    const char* const tasks =
        variables("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    Place place = place_of(read, "Slurm", "SLURM_PROCID", tasks);
    if (place.size == 1) return place;
    const char* const nodes =
        variables("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    place.hosts = expand_hosts(read.text(nodes));
    const int job = read.number("SLURM_JOB_ID", 0, INT32_MAX),
              step = read.number("SLURM_STEP_ID", 0, INT32_MAX);
    place.job = concat("Slurm ", job, ".", step);
    // Steps that may run at the same time get ports of their own, below those that the kernel gives
    // to connections.
    constexpr int64_t lowest = 20480, blocks = 1536;
    const int64_t block = (int64_t{job} * 31 + step) % blocks;
    place.ports = ports_from(static_cast<int>(lowest + block * spare_ports));
    place.host = place.hosts.front();
    place.host_from = nodes;
    if (const char* address = variables("TRAIN_GPT_ADDRESS")) set_address(place, address);
    return place;
}

/// What MPI's launchers leave in the environment. An mpirun within a step inherits Slurm's
/// variables, so its own count comes first.
Place place_of_mpi(const Variables& variables) {
    Place place;
    place.size = 0;
    for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK"}) {
        const char* value = variables(variable);
        if (!value) continue;
        const bool is_count = std::string(variable).ends_with("SIZE");
        // srun says how many there are.
        const char* count = is_count ? value : variables("SLURM_STEP_NUM_TASKS");
        const std::optional<int64_t> ranks = parse_number(count ? count : "");
        if (is_count && !(ranks && *ranks > 0)) continue;
        place.variable = is_count || !ranks ? variable : "SLURM_STEP_NUM_TASKS";
        place.size = ranks && *ranks > 0 ? static_cast<int>(*ranks) : 0;
        place.through = place.size == 1 ? Place::Through::nothing : Place::Through::mpi;
        return place;
    }
    return {};
}

/// Whether the step's tasks are the ranks, and not the daemons of an mpirun that runs in it.
bool started_by_srun(const Variables& variables) {
    const auto agrees = [&](const char* variable, const char* with) {
        const char *value = variables(variable), *other = variables(with);
        return !value || (other && std::string(value) == other);
    };
    return is_in_step(variables) && !variables("OMPI_COMM_WORLD_SIZE") &&
           agrees("PMI_SIZE", "SLURM_STEP_NUM_TASKS") && agrees("PMIX_RANK", "SLURM_PROCID") &&
           agrees("PMI_RANK", "SLURM_PROCID");
}

Place find(const Variables& variables, bool has_mpi) {
    const bool is_torch = variables("RANK") && variables("WORLD_SIZE");
    if (is_torch && variables("TORCHELASTIC_RUN_ID")) return place_of_torchrun(variables);
    const Place mpi = place_of_mpi(variables);
    if (!mpi.variable.empty() && has_mpi) return mpi;
    if (variables("TRAIN_GPT_RANK") || variables("TRAIN_GPT_WORLD")) return place_of_own(variables);
    if (is_torch) return place_of_torchrun(variables);
    if (started_by_srun(variables)) return place_of_slurm(variables);
    return mpi;
}

}  // namespace

Place find_place(const Variables& variables, bool has_mpi) {
    const Place place = find(variables, has_mpi);
    return place.size == 1 ? Place{} : place;
}

std::vector<std::string> expand_hosts(const std::string& list) {
    const auto fail = [&]() -> Error {
        return Error("the list of Slurm's nodes, \"", list, "\", cannot be understood");
    };
    std::vector<std::string> hosts;
    size_t at = 0;
    while (at < list.size()) {
        // One item: text and brackets, up to a comma outside of brackets.
        std::vector<std::string> names{""};
        for (; at < list.size() && list[at] != ','; ++at) {
            if (list[at] != '[') {
                for (std::string& name : names) name += list[at];
                continue;
            }
            const size_t end = list.find(']', at);
            if (end == std::string::npos) throw fail();
            std::vector<std::string> numbers;
            for (size_t begin = at + 1; begin <= end;) {
                const size_t stop = std::min(list.find(',', begin), end);
                const std::string range = list.substr(begin, stop - begin);
                const size_t dash = range.find('-');
                const std::string low = range.substr(0, dash),
                                  high = dash == std::string::npos ? low : range.substr(dash + 1);
                const std::optional<int64_t> first = parse_number(low), last = parse_number(high);
                if (!first || !last || *first < 0 || *last < *first || *last - *first > most_ranks)
                    throw fail();
                for (int64_t n = *first; n <= *last; ++n) {
                    const std::string digits = std::to_string(n);
                    const size_t zeros = low.size() - std::min(low.size(), digits.size());
                    numbers.push_back(std::string(zeros, '0') + digits);
                }
                begin = stop + 1;
            }
            std::vector<std::string> longer;
            for (const std::string& name : names)
                for (const std::string& number : numbers) longer.push_back(name + number);
            names = std::move(longer);
            if (names.size() > most_ranks) throw fail();
            at = end;
        }
        for (std::string& name : names)
            if (name.empty()) throw fail();
        hosts.insert(hosts.end(), names.begin(), names.end());
        ++at;
    }
    if (hosts.empty()) throw fail();
    return hosts;
}

}  // namespace train_gpt
