#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/printable.h"
#include "base/terminal_text.h"
#include "model/families/family.h"
#include "model/families/other.h"
#include "training/commands/commands.h"
#include "training/commands/prompts.h"
#include "training/inference_session.h"
#include "training/look/look_page.h"

namespace train_gpt::commands {

namespace {

namespace fs = std::filesystem;

std::string prompt_of(const CommandLine& line) {
    if (line.prompt_file.empty() && line.prompt.value_or("").empty())
        throw UsageError(
            "there is no text to look at; give one with --prompt or --prompt-file: train_gpt look "
            "CHECKPOINT --prompt \"Once upon a time\"");
    if (line.prompt) return *line.prompt;
    std::string prompt = read_prompt(line.prompt_file);
    if (prompt.empty())
        throw Error(line.prompt_file == "-" ? "standard input" : line.prompt_file,
                    " has no text to look at; check --prompt-file");
    return prompt;
}

/// The text's tokens, after the token from which the model sees a new document.
std::vector<int32_t> tokens_of(const std::string& prompt, const InferenceSession& session) {
    const Tokenizer& tokenizer = session.tokenizer();
    std::vector<int32_t> tokens;
    if (const auto boundary = tokenizer.document_boundary())
        tokens.push_back(static_cast<int32_t>(*boundary));
    for (const uint32_t id : tokenizer.encode(prompt)) tokens.push_back(static_cast<int32_t>(id));
    for (const int32_t token : tokens)
        if (token >= session.spec().vocab_size)
            throw Error("the tokenizer gives the text the token ", token,
                        ", but the model's vocabulary has only ", session.spec().vocab_size,
                        "; use the tokenizer that the model was trained with");
    return tokens;
}

/// "story/step-00000300", "gpt2"
std::string name_of_model(const fs::path& folder) {
    const fs::path path = fs::canonical(folder);
    if (!path.filename().string().starts_with("step-")) return path.filename();
    return path.parent_path().filename() / path.filename();
}

/// The family, or the parts of a model that no family has.
std::string architecture_of(const DecoderSpec& spec) {
    if (spec.family != &other) return concat("A model of the family ", spec.family->title);
    const char* mlp = spec.mlp == Mlp::swiglu ? "SwiGLU"
                      : spec.mlp == Mlp::gelu ? "GELU"
                                              : "squared ReLU";
    return concat(spec.experts ? "A mixture of experts with " : "A decoder with ",
                  spec.norm == Norm::rms ? "RMSNorm, " : "LayerNorm, ",
                  spec.is_rotary() ? "rotary" : "learned", " positions and ", mlp);
}

std::string described_model(const InferenceSession& session) {
    const DecoderSpec& spec = session.spec();
    std::string experts;
    if (spec.experts)
        experts = concat(", with ", spec.experts.n_expert, " experts, of which each token goes to ",
                         spec.experts.n_expert_per_token);
    return concat(
        architecture_of(spec), ": ", spec.n_layer, spec.n_layer == 1 ? " layer of " : " layers of ",
        spec.n_head, spec.n_head == 1 ? " head" : " heads", experts, ", vectors of ", spec.n_embd,
        " numbers, and a vocabulary of ", with_separators(static_cast<uint64_t>(spec.vocab_size)),
        " tokens, computed ", session.described_dtype(), ".");
}

}  // namespace

int look(const CommandLine& line) {
    const std::string prompt = prompt_of(line);
    AtomicFile file(line.page);  // a file that cannot be written is refused before the work
    InferenceSession session(line.checkpoint, line.device, line.dtype,
                             InferenceSession::For::looking);
    std::vector<int32_t> tokens = tokens_of(prompt, session);
    const auto most = static_cast<size_t>(session.generator().context());
    std::string note;
    if (tokens.size() > most) {
        note = concat("the text has ", tokens.size(), " tokens; the page shows the first ", most);
        tokens.resize(most);
    }
    const Inside inside = look_inside(session.stream(), session.generator(), tokens, 6,
                                      session.tokenizer().vocab_size());
    file.write(look_page({.inside = inside,
                          .tokenizer = session.tokenizer(),
                          .name = name_of_model(session.path()),
                          .model = described_model(session),
                          .note = note}));
    file.commit();
    if (!note.empty()) print_line(stderr, "train_gpt: note: " + note);
    print_line(stdout, "wrote " + printable(line.page));
    return 0;
}

}  // namespace train_gpt::commands
