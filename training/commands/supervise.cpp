#include "training/supervise/supervise.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "training/commands/commands.h"
#include "training/commands/parse_command_line.h"
#include "training/interrupt.h"
#include "training/run_data.h"
#include "training/supervise/host_agent.h"

namespace train_gpt::commands {

namespace {

constexpr int usual_port = 29500;

/// The command that is supervised, understood. Throws UsageError if it is not `train`.
CommandLine inner_command(const std::vector<std::string>& words) {
    if (words.empty())
        throw UsageError(
            "supervise needs the command that it runs after --: train_gpt supervise "
            "--hosts hosts -- train CONFIG");
    if (words.front() != "train")
        throw UsageError("supervise runs `train` alone, and after -- there is \"", words.front(),
                         "\": train_gpt supervise --hosts hosts -- train CONFIG");
    std::vector<std::string> texts{"train_gpt"};
    texts.insert(texts.end(), words.begin(), words.end());
    std::vector<char*> pointers;
    for (std::string& text : texts) pointers.push_back(text.data());
    const CommandLine inner = parse_command_line(static_cast<int>(texts.size()), pointers.data());
    if (inner.command != CommandLine::Command::train || inner.print_config)
        throw UsageError(
            "the command after -- does not train; ask for help and for the "
            "configuration without supervise");
    return inner;
}

/// `plan` for the same configuration.
std::vector<std::string> plan_arguments(const CommandLine& inner) {
    std::vector<std::string> arguments{"plan", inner.config};
    if (!inner.data.empty()) arguments.insert(arguments.end(), {"--data", inner.data});
    for (const std::string& set : inner.overrides)
        arguments.insert(arguments.end(), {"--set", set});
    return arguments;
}

/// How many GPUs of this machine a process would find. Nothing is opened: the ranks need them.
int gpus_here() {
    if (const char* const list = std::getenv("CUDA_VISIBLE_DEVICES"))
        return *list ? static_cast<int>(std::count(list, list + std::strlen(list), ',')) + 1 : 0;
    int gpus = 0;
    std::error_code code;
    while (std::filesystem::exists(concat("/dev/nvidia", gpus), code)) ++gpus;
    return gpus;
}

/// The hosts, and how they are reached.
SupervisedJob job_of(const SuperviseOptions& options) {
    SuperviseOptions with = options;
    const auto make = [&](Reach::Way way, const std::vector<JobHost>& hosts) {
        return SupervisedJob{.options = with,
                             .reach = Reach(way, options.ssh),
                             .hosts = hosts,
                             .config = {},
                             .plan = {}};
    };
    if (!options.hosts.empty()) {
        const std::vector<JobHost> hosts = read_hosts(options.hosts);
        for (const JobHost& host : hosts)
            if (hosts.size() > 1 && options.ssh.empty() && is_this_machine(host.address))
                throw Error(options.hosts, ": other hosts cannot find ", host.name,
                            " by this name; give this machine the name that it has in the network, "
                            "or address=NAME after its slots");
        const bool is_alone = hosts.size() == 1 && is_this_machine(hosts.front().address);
        if (with.port == 0 && !is_alone) with.port = usual_port;
        return make(Reach::Way::ssh, hosts);
    }
    const auto variables = [](const std::string& name) { return std::getenv(name.c_str()); };
    if (std::vector<JobHost> hosts = slurm_hosts(variables); !hosts.empty() && options.ranks == 0) {
        if (with.port == 0) with.port = usual_port;
        return make(Reach::Way::srun, hosts);
    }
    const int ranks = options.ranks > 0 ? options.ranks : std::max(gpus_here(), 1);
    return make(Reach::Way::ssh, {{"localhost", ranks, "127.0.0.1"}});
}

}  // namespace

int supervise(const CommandLine& line) {
    if (line.supervise.on_host) return run_host_agent();
    const CommandLine inner = inner_command(line.supervise.command);
    SupervisedJob job = job_of(line.supervise);
    if (static_cast<size_t>(line.supervise.spares) >= job.hosts.size())
        throw UsageError("--spares ", line.supervise.spares, " leaves no host to train on; there ",
                         job.hosts.size() == 1 ? "is " : "are ", job.hosts.size(),
                         job.hosts.size() == 1 ? " host" : " hosts");
    job.plan = plan_arguments(inner);
    job.config = [&](int world) {
        Config config = config_of_command(inner, world);
        require_run_inputs(config, inner.config);
        return config;
    };
    catch_interrupts();
    return train_gpt::supervise(job);
}

}  // namespace train_gpt::commands
