#include "kernels/attention/engine.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>

#include "base/error.h"
#include "device/cuda.h"
#include "kernels/attention/cudnn.h"
#ifdef TRAIN_GPT_CUDA
#include "device/cuda_queue.h"
#endif

namespace train_gpt {

namespace {

std::string explain(const AttentionUse::Pass& pass, const char* which) {
    return pass.reason.empty() ? concat(pass.engine, which)
                               : concat(pass.engine, " kernels", which, ", ", pass.reason);
}

}  // namespace

std::string AttentionUse::engines() const {
    if (backward.engine.empty() || forward.engine == backward.engine) return forward.engine;
    return concat(forward.engine, " forward, ", backward.engine, " backward");
}

std::string AttentionUse::explained() const {
    if (backward.engine.empty() || forward == backward) return explain(forward, "");
    return concat(explain(forward, " forward"), "; ", explain(backward, " backward"));
}

AttentionUse attention_use([[maybe_unused]] const Stream& stream) {
#ifdef TRAIN_GPT_CUDA
    if (stream.queue) return stream.queue->kept<cuda::AttentionEngines>().use();
#endif
    return {};
}

#ifdef TRAIN_GPT_CUDA
namespace cuda {

namespace {

using Wanted = KernelSettings::Attention;

constexpr const char* direction_names[] = {"forward", "backward"};
constexpr const char* engine_names[] = {"own", "cudnn"};

/// Different queues fail for the same reasons: each line is printed only once.
void say_once(const std::string& line) {
    static std::set<std::string> said;
    if (said.insert(line).second) std::fprintf(stderr, "train_gpt: %s\n", line.c_str());
}

/// Reads the next word as the name of a value. An unknown name sets the stream's failbit.
template <class Value, size_t n>
Value read_name(std::istream& from, const char* const (&names)[n]) {
    std::string word;
    from >> word;
    const auto found = std::find(std::begin(names), std::end(names), word);
    if (found == std::end(names)) from.setstate(std::ios::failbit);
    return static_cast<Value>(found - std::begin(names));
}

/// A shape as a word of choices(). Calls with documents, which no library computes, have no choice.
std::string word_of(const AttentionShape& s) {
    return concat("B=", s.B, ",T=", s.T, ",S=", s.S, ",H=", s.H, ",H_kv=", s.H_kv, ",D=", s.D);
}

bool is_shape(const std::string& word) {
    int numbers[6] = {}, end = 0;
    return std::sscanf(word.c_str(), "B=%d,T=%d,S=%d,H=%d,H_kv=%d,D=%d%n", &numbers[0], &numbers[1],
                       &numbers[2], &numbers[3], &numbers[4], &numbers[5], &end) == 6 &&
           static_cast<size_t>(end) == word.size();
}

}  // namespace

AttentionEngines::AttentionEngines(const Queue& queue)
    : AttentionEngines(queue.stream(), queue.limits().architecture) {}

double AttentionEngines::median_seconds(Stream& stream, const Work& work) {
    const std::shared_ptr<void> first = create_event(stream.device, true),
                                last = create_event(stream.device, true);
    std::array<double, 5> seconds{};
    for (double& time : seconds) {
        record(first.get(), stream);
        work();
        record(last.get(), stream);
        time = seconds_between(first.get(), last.get());
    }
    std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
    return seconds[seconds.size() / 2];
}

void AttentionEngines::forward(Stream& stream, const AttentionForward& args, const Work& own) {
    if (!args.lse) return own();
    if (const std::string limit = cudnn_limit(args); !limit.empty())
        return run_own(forward_pass, own, "since " + limit);
    run(stream, {forward_pass, word_of(args.shape), own,
                 [&] { library().forward(args, stream.scratch, stream.scratch_bytes); }});
}

void AttentionEngines::backward(Stream& stream, const AttentionBackward& args, const Work& own) {
    if (const std::string limit = cudnn_limit(args); !limit.empty())
        return run_own(backward_pass, own, "since " + limit);
    const std::vector<AttentionBackward> calls = cudnn_calls(args, architecture_);
    if (calls.empty())
        return run_own(backward_pass, own, "since cuDNN would need more than 2 GiB for one head");
    run(stream, {backward_pass, word_of(args.shape), own, [&] {
                     for (const AttentionBackward& call : calls)
                         library().backward(call, stream.scratch, stream.scratch_bytes);
                 }});
}

const AttentionEngines::Choice* AttentionEngines::Pass::choice_of(const std::string& shape) const {
    for (const std::string& word : {shape, std::string()})
        if (const auto found = chosen.find(word); found != chosen.end()) return &found->second;
    return nullptr;
}

void AttentionEngines::run(Stream& stream, const Call& call) {
    Pass& pass = passes_[call.direction];
    const Wanted wanted = stream.settings.attention;
    if (wanted == Wanted::own) return run_own(call.direction, call.own, "as configured");
    if (wanted == Wanted::automatic && !pass.choice_of(call.shape)) choose(stream, call);
    const Choice* const choice = pass.choice_of(call.shape);
    const bool chosen = wanted == Wanted::cudnn || (choice && choice->engine == Engine::library);
    if (chosen && attempt(stream, call)) {
        pass.ran = Engine::library;
        pass.reason.clear();
        return;
    }
    run_own(call.direction, call.own,
            !pass.failure.empty()     ? "since " + pass.failure
            : choice && choice->timed ? "which are faster here"
                                      : "as chosen at an earlier start");
}

void AttentionEngines::run_own(Direction direction, const Work& own, std::string reason) {
    own();
    passes_[direction].ran = Engine::own;
    passes_[direction].reason = std::move(reason);
}

/// Either pass writes the same outputs however often it runs, so it is timed with the actual
/// arguments.
void AttentionEngines::choose(Stream& stream, const Call& call) {
    Pass& pass = passes_[call.direction];
    Choice& choice = pass.chosen[call.shape];
    choice = {Engine::own, true};
    if (!attempt(stream, call)) return;
    call.own();  // so that one-time work is not timed
    const double library_seconds = time_(stream, [&] { attempt(stream, call); });
    const double own_seconds = time_(stream, call.own);
    if (pass.failure.empty() && library_seconds < own_seconds) choice.engine = Engine::library;
}

/// False if the library failed, in this call or an earlier one.
bool AttentionEngines::attempt(const Stream& stream, const Call& call) {
    Pass& pass = passes_[call.direction];
    if (!pass.failure.empty()) return false;
    try {
        call.by_library();
        return true;
    } catch (const std::exception& reason) {
        pass.failure = reason.what();
        say_once(
            concat(call.direction == forward_pass ? "attention" : "the backward pass of attention",
                   " runs on our own kernels, since ", pass.failure));
    }
    // If the forward pass fails, the backward pass is not attempted either. The reverse is common:
    // the backward pass alone fails, since it needs more memory.
    if (call.direction == forward_pass) passes_[backward_pass].failure = pass.failure;
    if (stream.settings.attention == Wanted::automatic)
        for (Pass& each : passes_)
            for (auto& [shape, choice] : each.chosen)
                if (!each.failure.empty()) choice.engine = Engine::own;
    return false;
}

AttentionLibrary& AttentionEngines::library() {
    if (!library_) library_ = open_(stream_);
    return *library_;
}

AttentionUse AttentionEngines::use() const {
    const auto of = [&](const Pass& pass) -> AttentionUse::Pass {
        if (!pass.ran) return {};
        return {pass.ran == Engine::own ? "own" : library_->name(), pass.reason};
    };
    return {of(passes_[forward_pass]), of(passes_[backward_pass])};
}

std::string AttentionEngines::choices() const {
    std::string text;
    for (const Direction direction : {forward_pass, backward_pass})
        for (const auto& [shape, choice] : passes_[direction].chosen)
            text += concat("attention ", direction_names[direction], shape.empty() ? "" : " ",
                           shape, " ", engine_names[static_cast<int>(choice.engine)], "\n");
    return text;
}

std::array<AttentionEngines::Choices, 2> AttentionEngines::read(const std::string& choices) {
    std::array<Choices, 2> chosen;
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream from(line);
        std::string subject, shape, rest;
        from >> subject;
        const auto direction = read_name<Direction>(from, direction_names);
        const auto before_shape = from.tellg();
        if (from >> shape && !is_shape(shape)) {
            shape.clear();
            from.seekg(before_shape);
        }
        const auto engine = read_name<Engine>(from, engine_names);
        if (!from || subject != "attention" || from >> rest)
            throw Error("The choices of attention engines are damaged in the line \"", line,
                        "\"; remove them to choose again.");
        chosen[direction][shape] = {engine, false};
    }
    return chosen;
}

void AttentionEngines::set_choices(const std::string& text) {
    auto chosen = read(text);
    for (const Direction direction : {forward_pass, backward_pass})
        passes_[direction].chosen = std::move(chosen[direction]);
}

bool AttentionEngines::unite_choices(const std::vector<std::string>& texts) {
    std::array<Choices, 2> united;
    for (const std::string& text : texts) {
        auto chosen = read(text);
        for (const Direction direction : {forward_pass, backward_pass})
            united[direction].merge(chosen[direction]);  // what is there stays
    }
    bool otherwise = false;
    for (const Direction direction : {forward_pass, backward_pass}) {
        Pass& pass = passes_[direction];
        for (auto& [shape, choice] : united[direction]) {
            const auto found = pass.chosen.find(shape);
            if (found == pass.chosen.end()) continue;
            if (found->second.engine == choice.engine)
                choice.timed = found->second.timed;
            else
                otherwise = true;
        }
        pass.chosen = std::move(united[direction]);
    }
    return otherwise;
}

size_t attention_library_forward_scratch_bytes(const KernelSettings& settings,
                                               const AttentionShape& shape) {
    const bool usable =
        settings.attention != Wanted::own && cudnn_supports(shape) && cudnn_obstacle().empty();
    return usable ? cudnn_forward_bytes : 0;
}

size_t attention_library_scratch_bytes(const KernelSettings& settings, const AttentionShape& shape,
                                       int architecture) {
    const size_t forward = attention_library_forward_scratch_bytes(settings, shape);
    return forward ? std::max(forward, cudnn_backward_bytes(shape, architecture)) : 0;
}

}  // namespace cuda
#endif

}  // namespace train_gpt
