#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include <unistd.h>

#include "base/printable.h"
#include "training/commands/commands.h"
#include "training/commands/prompts.h"
#include "training/inference_session.h"
#include "training/interrupt.h"
#include "training/sampling.h"

namespace train_gpt::commands {

int sample(const CommandLine& line) {
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::sampling);
    const Tokenizer& tokenizer = session.tokenizer();  // if there is none, throws before any output
    // A terminal would obey control characters; a file or a program gets the model's exact output.
    const auto print = [is_terminal = ::isatty(STDOUT_FILENO) != 0](std::string_view text) {
        const std::string shown = is_terminal ? printable(text) : std::string(text);
        std::fwrite(shown.data(), 1, shown.size(), stdout);
        std::fflush(stdout);
    };
    SamplingOptions options = line.sampling;
    options.ends = session.ends();
    bool is_first = true;
    uint64_t number = 0;  // each text has its own random numbers
    const auto write = [&](const std::string& prompt, const std::function<bool()>& stop) {
        for (int i = 0; i < line.samples && !(stop && stop()); ++i) {
            if (i > 0) print("\n---\n");
            print(prompt);
            sample_text({session.stream(), session.generator(), tokenizer}, prompt, options,
                        number++, print, stop);
        }
        print("\n");
        if (std::exchange(is_first, false))
            std::fprintf(stderr, "train_gpt: computed %s\n", session.described_dtype().c_str());
    };
    if (!line.prompt_file.empty())
        write(read_prompt(line.prompt_file), {});
    else if (!line.prompt && ::isatty(STDIN_FILENO) && ::isatty(STDOUT_FILENO))
        ask_for_prompts([&](const std::string& prompt) {
            const SignalWatch ctrl_c({SIGINT});
            write(prompt, [&] { return ctrl_c.came(); });
        });
    else
        write(line.prompt.value_or(""), {});
    return 0;
}

}  // namespace train_gpt::commands
