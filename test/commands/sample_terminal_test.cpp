// train_gpt sample: where its prompts come from.
#include <algorithm>

#include "test/commands/terminal.h"

using namespace train_gpt;

TEST_CASE("sample continues the text of a file or of standard input, byte for byte", "[cli]") {
    const TemporaryDirectory directory;
    const std::string prompt = "some \"text\"\nof two lines \xc3\xa4\xff  ";
    const Arguments sample{"sample", finished_run(), "--max-tokens", "20"};
    const std::string wanted =
        check_succeeds(train_gpt_with(sample + Arguments{"--prompt", prompt})).out;
    for (const char* end : {"", "\n", "\r\n"}) {
        write(directory / "prompt", prompt + end);
        CHECK(check_succeeds(
                  train_gpt_with(sample + Arguments{"--prompt-file", directory / "prompt"}))
                  .out == wanted);
    }
    const ProgramResult piped = run_program(
        {"sh", "-c",
         "'" + binary() + "' sample '" + finished_run() + "' --max-tokens 20 --prompt-file - < '" +
             (directory / "prompt") + "' 2> /dev/null"},
        {{"OMP_NUM_THREADS", "1"}});
    CHECK(piped.output == wanted);
    // A second line break belongs to the text.
    write(directory / "prompt", prompt + "\n\n");
    CHECK(check_succeeds(train_gpt_with(sample + Arguments{"--prompt-file", directory / "prompt"}))
              .out ==
          check_succeeds(train_gpt_with(sample + Arguments{"--prompt", prompt + "\n"})).out);

    check_refused(train_gpt_with(sample + Arguments{"--prompt-file", directory / "none"}), 1,
                  {"cannot read the prompt", directory / "none", "--prompt-file"});
    check_refused(train_gpt_with(sample + Arguments{"--prompt-file", directory.path()}), 1,
                  {"cannot read the prompt"});
    check_refused(
        train_gpt_with(sample + Arguments{"--prompt", "a", "--prompt-file", directory / "prompt"}),
        2, {"--prompt"});
}

TEST_CASE("sample says that a tokenizer is missing before it prints anything", "[cli]") {
    const Outcome outcome =
        train_gpt_with({"sample", "test/fixtures/gpt2-tiny", "--prompt", "hello"});
    check_refused(outcome, 1, {"has no tokenizer.json"});
    CHECK(outcome.out.empty());
}

TEST_CASE("on a terminal sample asks for text after text, and Ctrl-C stops one of them", "[cli]") {
    if (skip_without_terminals()) return;
    // Only the two likeliest tokens: the end of the text is not one of them, so only Ctrl-C ends a
    // sample.
    TerminalProcess process({"sample", finished_run(), "--max-tokens", "10000000", "--top-k", "2"},
                            80);
    const auto prompts = [&] {
        size_t n = 0;
        for (size_t at = 0; (at = process.screen().find("\n> ", at)) != std::string::npos; ++at)
            ++n;
        return n;
    };
    for (const std::string text : {"first text", "another"}) {
        const size_t asked = prompts();
        REQUIRE(process.wait_until([&] { return prompts() > 0; }));
        const size_t begin = process.screen().size();
        process.type(text + "\n");
        // The echo of the keys, and then the text again with its continuation.
        const std::string written = text + "\n" + text;
        REQUIRE(process.wait_until([&] {
            const size_t at = process.screen().find(written, begin);
            return at != std::string::npos && process.screen().size() > at + written.size() + 100;
        }));
        process.type("\x03");
        REQUIRE(process.wait_until([&] { return prompts() > std::max<size_t>(asked, 1); }));
    }
    process.type(random_int(0, 1) ? "\n" : "\x04");
    const int code = process.finish();
    INFO(process.screen());
    CHECK(code == 0);
}
