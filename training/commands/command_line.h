// The command line: what the user typed, as one struct.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "dataloader/prepare.h"
#include "training/commands/verification_options.h"
#include "training/config/config.h"
#include "training/files/decay_start.h"
#include "training/files/interchange.h"
#include "training/replay.h"
#include "training/report/report_arguments.h"
#include "training/sampling.h"
#include "training/selfcheck.h"
#include "training/supervise/supervise_arguments.h"
#include "training/sweep/sweep_arguments.h"

namespace train_gpt {

struct CommandLine {
    enum class Command {
        none,
        tokenize,
        train,
        sweep,
        supervise,
        plan,
        sample,
        look,
        eval,
        import_,
        export_,
        selfcheck,
        verify,
        report,
        replay,
        config
    };

    /// none: the user asked for help or the version, and `output` is the answer.
    Command command = Command::none;
    std::string output;
    bool is_help = false;  // `output` is a help text, and not a script or a manual page

    // train, sweep, plan, eval: a folder that `tokenize` wrote; for eval also a glob
    std::string data;

    // train, replay: whose choices to take (decide()); empty: its checkpoint's
    std::string choices;

    // train, sweep, plan
    std::string config;  // a file, or the name of a preset
    std::vector<std::string> overrides;
    int64_t stop_at = 0;  // 0: the schedule's end
    int64_t profile = 0;  // steps to profile; 0: none
    int64_t trace = 0;    // steps to trace; 0: none
    bool print_config = false;
    bool quiet = false;
    int world = 1;
    // plan
    int ranks_here = 0;      // of `world`, on this machine; 0: unknown
    std::string picture;     // file for the pipeline's schedule
    std::string gpu;         // one that is not here
    uint64_t gpu_bytes = 0;  // its memory; 0: as its datasheet says
    struct Planning {
        std::string cluster;  // a name or a file; empty: none
        std::optional<double> price;
        bool json = false, search = false;
        std::string trace;  // a file to write; empty: none
    } planning;

    // sweep
    SweepOptions sweep;

    // supervise
    SuperviseOptions supervise;

    // tokenize
    PrepareOptions prepare;

    // look
    std::string page = "look.html";  // the file to write

    // sample, look, eval
    std::string checkpoint, hellaswag, device = "auto", dtype = "auto";
    std::optional<std::string> prompt;
    std::string prompt_file;  // "-": standard input
    SamplingOptions sampling;
    int samples = 1;
    int64_t max_tokens = 0, max_examples = 0;

    // eval
    struct Evaluation {
        std::vector<std::string> tasks;  // files or globs
        std::string items;               // a file to write; empty: none
        bool json = false;
    } evaluation;

    // import, export
    ImportOptions importing;
    ExportOptions exporting;

    // selfcheck, which also uses `device`
    SelfcheckOptions selfcheck;

    // verify
    VerifyOptions verifying;

    // report
    ReportOptions report;

    // replay
    ReplayOptions replay;

    // config
    std::string key;  // a key or a section; empty: all keys
    bool schema = false, markdown = false;
    int depth = 0;  // 0: none is given
};

/// The configuration for `train`, `sweep` and `plan`: a file or preset, then --data, then --set. No
/// rule between keys is checked, and schedule.decay_from is as it was given.
Config given_config(const CommandLine& line);

/// The configuration for a run on `world` ranks: what with_decay_from() makes of given_config(),
/// checked.
Config config_of_command(const CommandLine& line, int world, DecaysOf decays = DecaysOf::run);

}  // namespace train_gpt
