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
    run(forward_pass, stream, own,
        [&] { library().forward(args, stream.scratch, stream.scratch_bytes); });
}

void AttentionEngines::backward(Stream& stream, const AttentionBackward& args, const Work& own) {
    if (const std::string limit = cudnn_limit(args); !limit.empty())
        return run_own(backward_pass, own, "since " + limit);
    const std::vector<AttentionBackward> calls = cudnn_calls(args, architecture_);
    if (calls.empty())
        return run_own(backward_pass, own, "since cuDNN would need more than 2 GiB for one head");
    run(backward_pass, stream, own, [&] {
        for (const AttentionBackward& call : calls)
            library().backward(call, stream.scratch, stream.scratch_bytes);
    });
}

void AttentionEngines::run(Direction direction, Stream& stream, const Work& own,
                           const Work& by_library) {
    Pass& pass = passes_[direction];
    const Wanted wanted = stream.settings.attention;
    if (wanted == Wanted::own) return run_own(direction, own, "as configured");
    if (wanted == Wanted::automatic && pass.failure.empty() && !pass.chosen)
        choose(direction, stream, own, by_library);
    const bool chosen = wanted == Wanted::cudnn || pass.chosen == Engine::library;
    if (chosen && attempt(direction, stream, by_library)) {
        pass.ran = Engine::library;
        pass.reason.clear();
        return;
    }
    run_own(direction, own,
            !pass.failure.empty() ? "since " + pass.failure
            : pass.timed          ? "which are faster here"
                                  : "as chosen at an earlier start");
}

void AttentionEngines::run_own(Direction direction, const Work& own, std::string reason) {
    own();
    passes_[direction].ran = Engine::own;
    passes_[direction].reason = std::move(reason);
}

/// Either pass writes the same outputs however often it runs, so it is timed with the actual
/// arguments.
void AttentionEngines::choose(Direction direction, Stream& stream, const Work& own,
                              const Work& by_library) {
    Pass& pass = passes_[direction];
    pass.chosen = Engine::own;
    pass.timed = true;
    if (!attempt(direction, stream, by_library)) return;
    own();  // so that one-time work is not timed
    const double library_seconds = time_(stream, [&] { attempt(direction, stream, by_library); });
    const double own_seconds = time_(stream, own);
    if (pass.failure.empty() && library_seconds < own_seconds) pass.chosen = Engine::library;
}

/// False if the library failed, in this call or an earlier one.
bool AttentionEngines::attempt(Direction direction, const Stream& stream, const Work& by_library) {
    Pass& pass = passes_[direction];
    if (!pass.failure.empty()) return false;
    try {
        by_library();
        return true;
    } catch (const std::exception& reason) {
        pass.failure = reason.what();
        say_once(concat(direction == forward_pass ? "attention" : "the backward pass of attention",
                        " runs on our own kernels, since ", pass.failure));
    }
    // If the forward pass fails, the backward pass is not attempted either. The reverse is common:
    // the backward pass alone fails, since it needs more memory.
    if (direction == forward_pass) passes_[backward_pass].failure = pass.failure;
    if (stream.settings.attention == Wanted::automatic)
        for (Pass& each : passes_)
            if (!each.failure.empty()) each.chosen = Engine::own;
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
    for (const Direction direction : {forward_pass, backward_pass}) {
        const Pass& pass = passes_[direction];
        if (pass.chosen)
            text += concat("attention ", direction_names[direction], " ",
                           engine_names[static_cast<int>(*pass.chosen)], "\n");
    }
    return text;
}

std::array<std::optional<AttentionEngines::Engine>, 2> AttentionEngines::read(
    const std::string& choices) {
    std::array<std::optional<Engine>, 2> chosen;
    std::istringstream lines(choices);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream from(line);
        std::string subject, rest;
        from >> subject;
        const auto direction = read_name<Direction>(from, direction_names);
        const auto engine = read_name<Engine>(from, engine_names);
        if (!from || subject != "attention" || from >> rest)
            throw Error("The choices of attention engines are damaged in the line \"", line,
                        "\"; remove them to choose again.");
        chosen[direction] = engine;
    }
    return chosen;
}

void AttentionEngines::set_choices(const std::string& text) {
    const auto chosen = read(text);
    for (const Direction direction : {forward_pass, backward_pass})
        passes_[direction].chosen = chosen[direction], passes_[direction].timed = false;
}

bool AttentionEngines::unite_choices(const std::vector<std::string>& texts) {
    std::array<std::optional<Engine>, 2> united;
    for (const std::string& text : texts) {
        const auto chosen = read(text);
        for (const Direction direction : {forward_pass, backward_pass})
            if (!united[direction]) united[direction] = chosen[direction];
    }
    bool otherwise = false;
    for (const Direction direction : {forward_pass, backward_pass}) {
        Pass& pass = passes_[direction];
        if (pass.chosen == united[direction]) continue;
        otherwise = otherwise || pass.chosen;
        pass.chosen = united[direction], pass.timed = false;
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
