#include "training/commands/supervise_options.h"

#include <CLI/CLI.hpp>

#include "training/commands/shared_options.h"

namespace train_gpt {

void add_supervise_command(CLI::App& app, CommandLine& line) {
    SuperviseOptions& options = line.supervise;
    CLI::App* supervise = app.add_subcommand(
        "supervise",
        "Train on several hosts, and continue without those that are lost: supervise --hosts FILE "
        "-- train CONFIG");
    supervise->footer(
        "After --: train CONFIG and its options. Without --hosts the ranks run on the nodes of the "
        "Slurm allocation, or else on this machine.");
    auto* hosts =
        supervise
            ->add_option("--hosts", options.hosts,
                         "File with a line for each host: NAME slots=RANKS [address=NAME in the "
                         "ranks' network]")
            ->transform(path())
            ->type_name("FILE");
    supervise
        ->add_option("--ranks", options.ranks,
                     "Ranks on this machine, without a hosts file; default: one for each GPU")
        ->check(CLI::Range(1, 4096))
        ->excludes(hosts)
        ->type_name("N");
    supervise
        ->add_option("--spares", options.spares,
                     "The last N hosts get ranks only in place of others that are lost")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str()
        ->type_name("N");
    supervise
        ->add_option("--max-restarts", options.max_restarts,
                     "Restarts one after the other without a new checkpoint")
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str()
        ->type_name("N");
    supervise
        ->add_option("--backoff", options.backoff,
                     "Wait before the second restart without a new checkpoint; then twice as long "
                     "each time, up to ten minutes")
        ->check(from_to(0, 600))
        ->capture_default_str()
        ->type_name("SECONDS");
    supervise
        ->add_option("--patience", options.patience,
                     "How long a host may take to answer and to end its selfcheck")
        ->check(from_to(1, 86400))
        ->capture_default_str()
        ->type_name("SECONDS");
    supervise
        ->add_option("--port", options.port,
                     "The first of the ports at which ranks meet, 16 and one for each host. "
                     "Default: 29500, on this machine alone a free one")
        ->check(CLI::Range(1, 60000))
        ->type_name("PORT");
    supervise
        ->add_option("--threads", options.threads,
                     "Threads of each rank; default: the ranks of a host share its cores")
        ->check(CLI::Range(1, 4096))
        ->type_name("N");
    supervise
        ->add_option("--ssh", options.ssh,
                     "The command that reaches a host; the host's name and a command for its shell "
                     "are added. Default: ssh without passwords; with Slurm srun, whose --nodelist "
                     "and a program are added")
        ->type_name("COMMAND");
    auto* selfcheck = supervise
                          ->add_option("--selfcheck", options.selfcheck,
                                       "Arguments of selfcheck: --selfcheck \"--tolerance 25\"")
                          ->type_name("ARGUMENTS");
    supervise
        ->add_flag("--no-selfcheck", options.no_selfcheck,
                   "Only ask whether hosts answer, instead of a selfcheck before each start")
        ->excludes(selfcheck);
    supervise->add_flag("--on-host", options.on_host)->group("");
}

}  // namespace train_gpt
