#include "kernels/attention/engine.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <set>
#include <sstream>

#include "base/error.h"
#include "device/cuda.h"
#include "kernels/attention/cudnn.h"
#include "kernels/convert.h"
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
constexpr const char* way_names[] = {"own", "cudnn", "cudnn_ordered", "cudnn_unordered", "wgmma"};
/// What follows the library's name.
constexpr const char* way_notes[] = {"", "", " (ordered)", " (unordered)", ""};

/// cuDNN's ways to compute a backward pass that the settings allow, that skip what a window hides
/// and that do not need too much memory for one head, the preferred one first. Memory is planned
/// for all of them.
std::vector<AttentionWay> backward_ways(const KernelSettings& settings, const AttentionShape& shape,
                                        int architecture) {
    std::vector<AttentionWay> ways;
    for (const AttentionWay way :
         {AttentionWay::cudnn_unordered, AttentionWay::cudnn, AttentionWay::cudnn_ordered})
        if ((way != AttentionWay::cudnn_unordered || !settings.deterministic) &&
            cudnn_heeds_window(shape, way, architecture) &&
            cudnn_backward_bytes(shape, way, architecture) > 0)
            ways.push_back(way);
    return ways;
}

/// With our own kernels, if the settings leave the choice; those for sm_90a if they can be timed.
std::vector<AttentionWay> with_own(std::vector<AttentionWay> ways, const KernelSettings& settings,
                                   const AttentionEngines::Attempt& wgmma) {
    if (settings.attention != Wanted::automatic) return ways;
    ways.push_back(AttentionWay::own);
    if (settings.autotune && wgmma) ways.push_back(AttentionWay::wgmma);
    return ways;
}

bool is_own(AttentionWay way) { return way == AttentionWay::own || way == AttentionWay::wgmma; }

bool contains(const std::vector<AttentionWay>& ways, AttentionWay way) {
    return std::ranges::find(ways, way) != ways.end();
}

constexpr const char* too_large = "since cuDNN would need more than 2 GiB for one head";
constexpr const char* heeds_no_window =
    "since cuDNN has no way here that skips what a window hides and always gives the same bits";
constexpr const char* too_old = "since cuDNN is used with a window or sinks from 9.13 on";
constexpr const char* fastest = "which are faster here";
constexpr const char* no_wgmma = "since those for sm_90a cannot compute this shape on this GPU";

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

constexpr const char *sinks_suffix = ",sinks", *own_suffix = ",own";
constexpr const char *keys_field = ",S=", *field_after_keys = ",H=";

/// A shape as a word of choices(). of_own: only our own kernels compute it.
std::string word_of(const AttentionShape& s, bool with_sinks, bool of_own) {
    return concat("B=", s.B, ",T=", s.T, keys_field, s.S, field_after_keys, s.H, ",H_kv=", s.H_kv,
                  ",D=", s.D, has_window(s) ? concat(",window=", s.window) : "",
                  with_sinks ? sinks_suffix : "", of_own ? own_suffix : "");
}

/// The word of a shape, but for its number of keys.
std::string without_keys(const std::string& word) {
    const size_t first = word.find(keys_field), last = word.find(field_after_keys);
    if (first == std::string::npos || last == std::string::npos) return word;
    return word.substr(0, first) + word.substr(last);
}

bool is_shape(std::string word) {
    for (const char* suffix : {own_suffix, sinks_suffix})
        if (word.ends_with(suffix)) word = word.substr(0, word.rfind(','));
    int numbers[7] = {}, end = 0, window_end = 0;
    const int found = std::sscanf(word.c_str(), "B=%d,T=%d,S=%d,H=%d,H_kv=%d,D=%d%n,window=%d%n",
                                  &numbers[0], &numbers[1], &numbers[2], &numbers[3], &numbers[4],
                                  &numbers[5], &end, &numbers[6], &window_end);
    return found >= 6 && static_cast<size_t>(found == 6 ? end : window_end) == word.size();
}

/// Submits the library's forward pass. cuDNN gets sinks in fp32, aligned.
void forward_by(AttentionLibrary& library, Stream& stream, AttentionForward args) {
    size_t sinks_bytes = 0;
    if (args.sinks) {
        sinks_bytes = cudnn_sinks_bytes(args.shape);
        const Tensor sinks(stream.scratch_for<float>(sinks_bytes), DType::fp32, {args.shape.H});
        cuda::widen(stream, sinks.as<float>(), args.sinks.data, args.sinks.dtype, args.shape.H,
                    false);
        args.sinks = sinks;
    }
    library.forward(args, static_cast<char*>(stream.scratch) + sinks_bytes,
                    stream.scratch_bytes - sinks_bytes);
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

void AttentionEngines::forward(Stream& stream, const AttentionForward& args, const Work& own,
                               const Attempt& wgmma) {
    if (!args.lse) {
        if (stream.settings.attention != Wanted::wgmma || !wgmma || !wgmma()) own();
        return;
    }
    const std::string limit = cudnn_limit(args);
    const bool with_sinks(args.sinks), of_own = !limit.empty();
    const std::string unable = of_own ? "since " + limit : too_old;
    std::vector<AttentionWay> ways;
    if (!of_own) ways = {AttentionWay::cudnn};
    run(stream, {.direction = forward_pass,
                 .shape = word_of(args.shape, with_sinks, of_own),
                 .ways = with_own(ways, stream.settings, wgmma),
                 .oldest_version = cudnn_oldest_version(args.shape, with_sinks),
                 .unable = unable,
                 .own = own,
                 .wgmma = wgmma,
                 .by_library = [&](AttentionWay) { forward_by(*library_, stream, args); }});
}

bool AttentionEngines::backward(Stream& stream, const AttentionBackward& args, const Work& own,
                                const Attempt& wgmma) {
    std::vector<AttentionWay> ways;
    std::string unable;
    if (const std::string limit = cudnn_limit(args); limit.empty()) {
        ways = backward_ways(stream.settings, args.shape, architecture_);
        unable = has_window(args.shape) ? heeds_no_window : too_large;
    } else {
        unable = "since " + limit;
    }
    return run(stream, {.direction = backward_pass,
                        .shape = word_of(args.shape, false, ways.empty()),
                        .ways = with_own(ways, stream.settings, wgmma),
                        .oldest_version = cudnn_oldest_version(args.shape, false),
                        .unable = unable,
                        .repeatable = args.key_gradients != KeyGradients::add_fp32,
                        .own = own,
                        .wgmma = wgmma,
                        .by_library = [&](AttentionWay way) {
                            for (const auto& call : cudnn_calls(args, way, architecture_))
                                library_->backward(way, call, stream.scratch, stream.scratch_bytes);
                        }});
}

AttentionEngines::Choice* AttentionEngines::Pass::choice_of(const std::string& shape) {
    for (const std::string& word : {shape, std::string()})
        if (const auto found = chosen.find(word); found != chosen.end()) return &found->second;
    return nullptr;
}

std::optional<AttentionEngines::Choice> AttentionEngines::Pass::choice_with_other_keys(
    const std::string& shape) const {
    const std::string wanted = without_keys(shape);
    for (const auto& [word, choice] : chosen)
        if (!word.empty() && without_keys(word) == wanted) return choice;
    return std::nullopt;
}

/// Whether our own kernels ran.
bool AttentionEngines::run(Stream& stream, const Call& call) {
    Pass& pass = passes_[call.direction];
    const Wanted wanted = stream.settings.attention;
    if (wanted == Wanted::own) return run_own(call.direction, call.own, "as configured");
    if (wanted == Wanted::wgmma) {
        if (!attempt(call, AttentionWay::wgmma)) return run_own(call.direction, call.own, no_wgmma);
        pass.ran = AttentionWay::wgmma;
        pass.reason = "as configured";
        return true;
    }
    // Nothing to choose.
    if (std::ranges::all_of(call.ways, [](AttentionWay way) { return way == AttentionWay::own; }))
        return run_own(call.direction, call.own, call.unable);
    Choice untimed;
    Choice* choice = &untimed;
    if (wanted == Wanted::automatic || stream.settings.autotune) {
        choice = pass.choice_of(call.shape);
        if (choice && !contains(call.ways, choice->way)) choice = nullptr;
        if (!choice && call.repeatable) choice = &choose(stream, call);
        if (!choice) {
            untimed = pass.choice_with_other_keys(call.shape).value_or(preferred(call));
            if (!contains(call.ways, untimed.way)) untimed = preferred(call);
            choice = &untimed;
        }
    } else {
        untimed = preferred(call);
    }
    while (!attempt(call, choice->way)) *choice = preferred(call);
    pass.ran = choice->way;
    pass.reason = choice->reason;
    if (choice->way == AttentionWay::cudnn_unordered) same_bits_ = false;
    return is_own(choice->way);
}

bool AttentionEngines::run_own(Direction direction, const Work& own, std::string reason) {
    own();
    passes_[direction].ran = AttentionWay::own;
    passes_[direction].reason = std::move(reason);
    return true;
}

/// A repeatable pass writes the same outputs however often it runs, so it is timed with the actual
/// arguments.
AttentionEngines::Choice& AttentionEngines::choose(Stream& stream, const Call& call) {
    std::vector<AttentionWay> candidates;  // that have run, so that one-time work is not timed
    for (const AttentionWay way : working(call))
        if (attempt(call, way)) candidates.push_back(way);
    if (contains(call.ways, AttentionWay::wgmma) && attempt(call, AttentionWay::wgmma))
        candidates.push_back(AttentionWay::wgmma);
    Choice& choice = passes_[call.direction].chosen[call.shape];
    choice = preferred(call);
    if (candidates.empty()) return choice;
    if (contains(call.ways, AttentionWay::own)) {
        call.own();
        candidates.insert(candidates.begin(), AttentionWay::own);
    }
    if (candidates.size() == 1) return choice;
    double least = std::numeric_limits<double>::infinity();
    for (const AttentionWay way : candidates) {
        bool failed = false;
        const double seconds = time_(stream, [&] { failed = failed || !attempt(call, way); });
        if (failed || seconds >= least) continue;
        least = seconds;
        choice = {way, is_own(way) ? fastest : ""};
    }
    return choice;
}

/// The first way of the library that works, otherwise our own kernels.
AttentionEngines::Choice AttentionEngines::preferred(const Call& call) {
    if (const auto ways = working(call); !ways.empty()) return {ways.front()};
    const std::string& failure = passes_[call.direction].failure;
    return {AttentionWay::own, failure.empty() ? call.unable : "since " + failure};
}

/// The library's ways that may compute the call.
std::vector<AttentionWay> AttentionEngines::working(const Call& call) {
    std::vector<AttentionWay> ways;
    for (const AttentionWay way : call.ways)
        if (!is_own(way) && works(call, way)) ways.push_back(way);
    return ways;
}

/// Whether the library has a way for the call that has not failed.
bool AttentionEngines::works(const Call& call, AttentionWay way) {
    if (passes_[call.direction].failed.contains(way)) return false;
    try {
        if (!library_) library_ = open_(stream_);
    } catch (const std::exception& reason) {
        give_up(reason.what());
        return false;
    }
    const size_t version = library_->version();
    return version >= call.oldest_version && cudnn_has(way, architecture_, version);
}

/// False if the library does not have the way, or if the way failed, in this call or an earlier
/// one.
bool AttentionEngines::attempt(const Call& call, AttentionWay way) {
    if (way == AttentionWay::own) {
        call.own();
        return true;
    }
    if (way == AttentionWay::wgmma) return call.wgmma && call.wgmma();
    if (!works(call, way)) return false;
    try {
        call.by_library(way);
        return true;
    } catch (const std::exception& reason) {
        // If the forward pass fails, the backward pass is not attempted either. The reverse is
        // common: the backward pass alone fails, since it needs more memory.
        if (call.direction == forward_pass) {
            give_up(reason.what());
            return false;
        }
        Pass& pass = passes_[call.direction];
        pass.failed.insert(way);
        pass.failure = reason.what();
        say_once(concat("the backward pass of attention ",
                        working(call).empty()
                            ? "runs on our own kernels"
                            : concat("does without ", way_names[static_cast<int>(way)]),
                        ", since ", pass.failure));
    }
    return false;
}

/// Our own kernels compute both passes from now on.
void AttentionEngines::give_up(const std::string& reason) {
    for (Pass& pass : passes_) {
        pass.failed = {AttentionWay::cudnn, AttentionWay::cudnn_ordered,
                       AttentionWay::cudnn_unordered};
        pass.failure = reason;
    }
    say_once("attention runs on our own kernels, since " + reason);
}

AttentionUse AttentionEngines::use() const {
    const auto of = [&](const Pass& pass) -> AttentionUse::Pass {
        if (!pass.ran) return {};
        return {pass.ran == AttentionWay::own ? "own"
                : pass.ran == AttentionWay::wgmma
                    ? "own (wgmma)"
                    : library_->name() + way_notes[static_cast<int>(*pass.ran)],
                pass.reason};
    };
    return {of(passes_[forward_pass]), of(passes_[backward_pass]), same_bits_};
}

std::string AttentionEngines::choices() const {
    std::string text;
    for (const Direction direction : {forward_pass, backward_pass})
        for (const auto& [shape, choice] : passes_[direction].chosen)
            text += concat("attention ", direction_names[direction], shape.empty() ? "" : " ",
                           shape, " ", way_names[static_cast<int>(choice.way)], "\n");
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
        const auto way = read_name<AttentionWay>(from, way_names);
        if (direction == forward_pass && !is_own(way) && way != AttentionWay::cudnn)
            from.setstate(std::ios::failbit);
        if (!from || subject != "attention" || from >> rest)
            throw Error("The choices of attention engines are damaged in the line \"", line,
                        "\"; remove them to choose again.");
        chosen[direction][shape] = {way, is_own(way) ? "as chosen at an earlier start" : ""};
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
            if (found->second.way == choice.way)
                choice.reason = found->second.reason;
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
    return usable ? cudnn_sinks_bytes(shape) + cudnn_forward_bytes : 0;
}

size_t attention_library_scratch_bytes(const KernelSettings& settings, const AttentionShape& shape,
                                       int architecture) {
    size_t most = attention_library_forward_scratch_bytes(settings, shape);
    if (most == 0) return 0;
    for (const AttentionWay way : backward_ways(settings, shape, architecture))
        if (cudnn_has(way, architecture, cudnn_version()))
            most = std::max(most, cudnn_backward_bytes(shape, way, architecture));
    return most;
}

}  // namespace cuda
#endif

}  // namespace train_gpt
