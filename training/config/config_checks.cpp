#include "training/config/config_checks.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "model/families/family.h"
#include "training/config/config_parser.h"
#include "training/config/config_text.h"
#include "training/config/feeding.h"
#include "training/config/layout.h"
#include "training/config/unread_settings.h"

namespace train_gpt {

namespace {

/// a · b · c, or 2^63 - 1 when that is larger.
int64_t saturating_product(int64_t a, int64_t b, int64_t c = 1) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product))
        return std::numeric_limits<int64_t>::max();
    return product;
}

class Checks {
  public:
    /// suggests: whether messages suggest values, each of which is tried.
    Checks(const Config& config, std::string name, int world, bool suggests)
        : config_(config), name_(std::move(name)), world_(world), suggests_(suggests) {}

    void all() const {
        model();
        batch();
        batch_warmup();
        refuse_if(pipeline_problem(pipeline_options(config_), config_.model.n_layer));
        tensor();
        context();
        if (const std::string unread = unread_setting(config_, spec()); !unread.empty())
            refuse(unread);
        experts();
        capacity();
        schedule();
        sums();
        offload();
        if (const std::string problem = fp8_problem(config_, spec()); !problem.empty())
            refuse(problem);
        optimizer();
        // MeshLayout refuses the same sizes, but does not know what else a size must fit.
        if (world_ > 1) refuse_if(mesh_problem(world_, mesh_sizes(config_)));
    }

  private:
    void model() const;
    void batch() const;
    void batch_warmup() const;
    void tensor() const;
    void context() const;
    void experts() const;
    void capacity() const;
    void schedule() const;
    void offload() const;
    void sums() const;
    void optimizer() const;

    DecoderSpec spec() const {
        try {
            return spec_of(config_, std::max(config_.model.vocab_size, 1));
        } catch (const Error& error) {
            throw Error(name_, ": ", error.what());
        }
    }

    template <class... Text>
    [[noreturn]] void refuse(const Text&... text) const {
        throw Error(name_, ": ", text...);
    }

    // ---- Suggestions ----------------------------------------------------------------------------

    bool accepts(const Config& changed) const {
        return keeps_rules(changed, world_) &&
               (world_ == 0 || can_feed(changed, mesh_of(changed, world_).size(Axis::data)));
    }

    /// The accepted value from 1 to `most` that is nearest to `wanted`, of two the lower one; `set`
    /// stores a value in a configuration.
    template <class Set>
    std::optional<int64_t> nearest(int64_t wanted, int64_t most, const Set& set) const {
        if (!suggests_) return {};
        constexpr int64_t enough = 4096;  // values that are tried
        for (int64_t distance = 0; distance < std::min(std::max(wanted, most), enough); ++distance)
            for (const int64_t value : {wanted - distance, wanted + distance}) {
                if (value < 1 || value > most) continue;
                Config changed = config_;
                set(changed, value);
                if (accepts(changed)) return value;
            }
        return {};
    }

    /// "; the nearest value that does is 3", or another change that is accepted, or nothing.
    template <class Set>
    std::string nearest_text(const char* what, int64_t wanted, int64_t most, const Set& set) const {
        const auto value = nearest(wanted, most, set);
        return value ? concat("; the nearest value that ", what, " is ", *value) : other_change();
    }

    /// "; parallel.tensor=1 works": a change to the mesh, or to the step, that is accepted.
    std::string other_change() const;

    /// Refuses what an axis says (parallel/axes/), with the nearest value that is accepted.
    void refuse_if(const std::optional<SizeProblem>& problem) const {
        if (!problem) return;
        const auto set = [&](Config& changed, int64_t value) {
            try {
                apply_override(changed, concat(problem->key, "=", value));
            } catch (const Error&) {
                // The key takes no such value. What is as before is not accepted.
            }
        };
        refuse(problem->text,
               problem->key.empty()
                   ? ""
                   : nearest_text(problem->does.c_str(), problem->value, problem->most, set),
               problem->afterwards);
    }

    const Config& config_;
    const std::string name_;
    const int world_;
    const bool suggests_;
};

std::string Checks::other_change() const {
    if (!suggests_) return "";
    using Changes = std::vector<std::string>;
    const Changes whole_pipeline = {"parallel.pipeline=1", "parallel.schedule=1f1b",
                                    "parallel.stages_per_rank=1", "parallel.layers_per_stage=[]"};
    const std::initializer_list<Changes> in_turn = {
        {"parallel.schedule=1f1b", "parallel.stages_per_rank=1"},
        {"parallel.tensor=1"},
        {"parallel.context=1"},
        whole_pipeline,
        {"batch.micro_batch=0"},
        {"parallel.shard_ranks=0"}};
    const auto text_of = [&](const Changes& changes) -> std::string {
        Config changed = config_;
        std::string text;
        for (const std::string& change : changes) {
            const Config before = changed;
            apply_override(changed, change);
            if (!config_differences(before, changed).empty())
                text += (text.empty() ? "" : " with ") + change;
        }
        return !text.empty() && accepts(changed) ? concat("; ", text, " works") : "";
    };
    Changes all;
    for (const Changes& changes : in_turn) {
        if (const std::string text = text_of(changes); !text.empty()) return text;
        all.insert(all.end(), changes.begin(), changes.end());
    }
    return text_of(all);
}

void Checks::model() const {
    const auto& m = config_.model;
    constexpr int max_head_size = 256;
    DecoderSpec defaults{.n_embd = m.n_embd};
    family_of(m.family, name_).defaults(defaults);
    const bool has_head_size = m.head_size > 0 || defaults.head_size > 0;
    const auto set_heads = [](Config& c, int64_t value) {
        c.model.n_head = static_cast<int>(value);
    };
    const auto set_width = [](Config& c, int64_t value) {
        c.model.n_embd = static_cast<int>(value);
    };
    const auto set_kv = [](Config& c, int64_t value) {
        c.model.n_kv_head = static_cast<int>(value);
    };
    if (!has_head_size && m.n_embd % m.n_head != 0) {
        constexpr int most_width = 262144;
        std::optional<int64_t> width;
        const int64_t size = std::max<int64_t>(1, (m.n_embd + m.n_head / 2) / m.n_head);
        for (const int64_t of : {size, size - 1, size + 1, size - 2, size + 2})
            if (Config changed = config_;
                suggests_ && !width && of > 0 && of * m.n_head <= most_width) {
                set_width(changed, of * m.n_head);
                if (accepts(changed)) width = of * m.n_head;
            }
        const auto heads = nearest(m.n_head, m.n_embd, set_heads);
        refuse(
            "model.n_embd = ", m.n_embd, " does not divide into model.n_head = ", m.n_head,
            " heads of equal size",
            width ? concat("; the nearest n_embd that does is ", *width) : "",
            heads ? concat(width ? ", and" : ";", " the nearest n_head that divides it is ", *heads)
                  : "");
    }
    if (!has_head_size && m.n_embd / m.n_head > max_head_size) {
        const auto heads =
            nearest((m.n_embd + max_head_size - 1) / max_head_size, m.n_embd, set_heads);
        refuse("model.n_embd / model.n_head = ", m.n_embd / m.n_head,
               " is the size of a head, which may be ", max_head_size, " at most",
               heads ? concat("; use n_head = ", *heads, " or more") : "");
    }
    if (m.n_kv_head > 0 && m.n_head % m.n_kv_head != 0)
        refuse("model.n_kv_head = ", m.n_kv_head, " does not divide model.n_head = ", m.n_head,
               ", and each key/value head serves the same number of query heads",
               nearest_text("does", m.n_kv_head, m.n_head, set_kv));
    try {
        (void)spec();
    } catch (const Error& error) {
        // Where another number or size of heads is right, such as an even size for rotation
        const auto heads = nearest(m.n_head, m.n_embd, set_heads);
        const auto sizes = nearest(m.head_size, max_head_size, [](Config& c, int64_t value) {
            c.model.head_size = static_cast<int>(value);
        });
        if (m.head_size > 0 && sizes)
            throw Error(error.what(), "; the nearest head_size that works is ", *sizes);
        if (m.head_size == 0 && heads)
            throw Error(error.what(), "; the nearest n_head that works is ", *heads);
        throw;
    }
}

void Checks::batch() const {
    const int length = config_.sequence_length();
    if (length > config_.model.n_ctx)
        refuse("batch.sequence_length = ", length,
               " is more than model.n_ctx = ", config_.model.n_ctx,
               "; shorten the sequence or raise n_ctx");
    const int64_t given = config_.batch.micro_batch, B = std::max<int64_t>(given, 1);
    const int64_t micro = B * length;
    if (micro > std::numeric_limits<int>::max())
        refuse("batch.micro_batch · sequence length = ", B, " · ", length, " = ", micro,
               " tokens are too many for one micro-batch; 2147483647 is the most");
    const int64_t widest = std::max<int64_t>(4LL * config_.model.n_embd, config_.model.vocab_size);
    if (saturating_product(micro, widest, 8) == std::numeric_limits<int64_t>::max())
        refuse("a micro-batch of ", micro, " tokens times ", widest,
               " (the larger of 4 · n_embd and vocab_size) overflows; lower batch.micro_batch");
    const int64_t tokens = config_.batch.tokens_per_step;
    if (tokens % micro != 0) {
        // The nearest whole numbers of micro-batches in both directions.
        const auto set = [&](Config& c, int64_t count) { c.batch.tokens_per_step = count * micro; };
        constexpr int64_t most_tokens = int64_t{1} << 32;  // the limit of batch.tokens_per_step
        std::optional<int64_t> below, above;
        for (int64_t d = 0; suggests_ && d < 4096 && !(below && above); ++d)
            for (auto [found, count] :
                 {std::pair{&below, tokens / micro - d}, {&above, tokens / micro + 1 + d}}) {
                Config changed = config_;
                set(changed, count);
                if (!*found && count > 0 && count * micro <= most_tokens && accepts(changed))
                    *found = count * micro;
            }
        refuse("batch.tokens_per_step = ", tokens, " is not a whole number of ",
               given > 0 ? concat("micro-batches of batch.micro_batch · sequence length = ", given,
                                  " · ", length, " = ", micro, " tokens")
                         : concat("sequences of ", length, " tokens"),
               below && above   ? concat("; the nearest that are: ", *below, " and ", *above)
               : below || above ? concat(below ? "; the nearest that is: " : "; the least is ",
                                         below ? *below : *above)
                                : "");
    }
    if (tokens / length > std::numeric_limits<int>::max())
        refuse("batch.tokens_per_step = ", tokens, " has ", tokens / length, " sequences of ",
               length, " tokens, and 2147483647 are the most; lower it or lengthen the sequences");
}

/// After batch(): tokens_per_step is a whole number of micro-batches.
void Checks::batch_warmup() const {
    const auto& b = config_.batch;
    const int64_t least = b.warmup_tokens_per_step, most = b.tokens_per_step;
    if (b.warmup_tokens == 0 && least == 0) return;
    if (b.warmup_tokens == 0 || least == 0)
        refuse(
            "a batch warm-up needs both batch.warmup_tokens and batch.warmup_tokens_per_step, "
            "but ",
            least == 0 ? "batch.warmup_tokens_per_step" : "batch.warmup_tokens",
            " is 0; set both, or both to 0");
    const int64_t micro = int64_t{std::max(b.micro_batch, 1)} * config_.sequence_length();
    const auto works = [&](int64_t tokens) { return most % tokens == 0 && tokens % micro == 0; };
    if (works(least)) return;
    std::vector<int64_t> others;
    for (int64_t tokens = micro; suggests_ && tokens <= most; tokens += micro)
        if (works(tokens)) others.push_back(tokens);
    std::ranges::stable_sort(others, {}, [&](int64_t tokens) { return std::abs(tokens - least); });
    const auto nearest = std::ranges::find_if(others, [&](int64_t tokens) {
        Config changed = config_;
        changed.batch.warmup_tokens_per_step = tokens;
        return accepts(changed);
    });
    refuse("batch.warmup_tokens_per_step = ", least, " must divide batch.tokens_per_step = ", most,
           " and be a whole number of ", b.micro_batch > 0 ? "micro-batches" : "sequences", " of ",
           micro, " tokens",
           nearest == others.end() ? "" : concat("; the nearest value that does is ", *nearest));
}

void Checks::tensor() const {
    const int tensor = config_.parallel.tensor;
    if (tensor == 1) return;
    std::vector<SharedSize> sizes = shared_sizes(spec());
    const SharedSize vocabulary = sizes.back();
    sizes.pop_back();
    refuse_if(tensor_problem(sizes, tensor));
    if (world_ < 2 || config_.model.vocab_size == 0) return;
    const auto problem = tensor_problem({vocabulary}, tensor);
    if (!problem) return;
    const auto fewer = nearest(tensor, problem->most, [](Config& c, int64_t value) {
        c.parallel.tensor = static_cast<int>(value);
    });
    refuse(problem->text, fewer ? concat("; parallel.tensor=", *fewer, " can") : other_change());
}

void Checks::context() const {
    const int length = config_.sequence_length();
    const bool has_length = config_.batch.sequence_length > 0;
    const auto problem = context_problem(has_length ? "batch.sequence_length" : "model.n_ctx",
                                         length, config_.parallel.context);
    if (!problem) return;
    // A step stays a whole number of micro-batches.
    const auto set = [&](Config& c, int64_t value) {
        (has_length ? c.batch.sequence_length : c.model.n_ctx) = static_cast<int>(value);
        const int64_t micro = value * std::max(c.batch.micro_batch, 1),
                      count = c.batch.tokens_per_step / micro;
        if (c.batch.tokens_per_step % micro != 0)
            c.batch.tokens_per_step = std::max<int64_t>(1, count) * micro;
    };
    const int64_t most = has_length ? config_.model.n_ctx : 16777216;
    const auto value = nearest(length, most, set);
    Config changed = config_;
    if (value) set(changed, *value);
    refuse(problem->text,
           !value ? other_change() : concat("; the nearest value that can is ", *value),
           changed.batch.tokens_per_step != config_.batch.tokens_per_step
               ? concat(", with batch.tokens_per_step=", changed.batch.tokens_per_step)
               : "");
}

void Checks::experts() const {
    const DecoderSpec decoder = spec();
    if (!decoder.experts) return;
    // The counts of a step are int32 (model/router_counts.h).
    const int64_t tokens = config_.batch.tokens_per_step;
    const int per_token = decoder.experts.n_expert_per_token;
    const int64_t most = std::numeric_limits<int32_t>::max() / per_token;
    if (tokens > most)
        refuse("batch.tokens_per_step = ", tokens, " with ", per_token,
               " experts a token is too many for the counts of a step; ", most, " is the most");
}

void Checks::capacity() const {
    const double capacity = config_.model.expert_capacity;
    if (capacity == 0) return;
    if (config_.parallel.context > 1)
        refuse("model.expert_capacity = ", capacity,
               " counts the tokens of whole sequences, but parallel.context = ",
               config_.parallel.context,
               " ranks have parts of them; set model.expert_capacity to 0 or parallel.context to "
               "1");
}

void Checks::sums() const {
    const auto& p = config_.parallel;
    if (p.sums != GradientSums::exact) return;
    if (p.reserved_sms > 0)
        refuse("parallel.reserved_sms = ", p.reserved_sms,
               " chooses other products on several ranks than on one, so parallel.sums = \"exact\" "
               "cannot give the same bits; set it to 0");
    if (config_.batch.micro_batch > 0)
        if (const std::string problem = contributions_problem(config_); !problem.empty())
            refuse(problem);
}

void Checks::offload() const {
    const std::vector<std::string>& words = config_.memory.offload;
    for (const char* alone : {"auto", "none"})
        if (words.size() > 1 && std::ranges::find(words, alone) != words.end())
            refuse("memory.offload has \"", alone, "\" beside other words; leave one of them out");
}

void Checks::optimizer() const {
    const auto& o = config_.optimizer;
    if (o.name == OptimizerName::muon && o.state_dtype == StateDType::int8)
        refuse(
            "optimizer.state_dtype = \"int8\" has blocks of 256 elements of a tensor, but "
            "optimizer.name = \"muon\" updates each of a tensor's matrices for itself, and they do "
            "not begin at such blocks; set optimizer.state_dtype to \"bf16\" or optimizer.name to "
            "\"adamw\"");
}

void Checks::schedule() const {
    const auto& schedule = config_.schedule;
    const int given = (schedule.steps > 0) + (schedule.tokens > 0) + (schedule.epochs > 0);
    if (given != 1)
        refuse(
            "exactly one of schedule.steps, schedule.tokens and schedule.epochs must say how long "
            "the run is, but ",
            given == 0   ? "none does"
            : given == 2 ? "two do"
                         : "all three do",
            given == 0 ? "; set one of them" : "; set the others to 0");
    if (!schedule.decay_from.empty() && schedule.decay != Decay::wsd)
        refuse(
            "schedule.decay_from decays from another run's checkpoint, which needs "
            "schedule.decay = \"wsd\", not \"",
            schedule.decay.word(), "\"");
    if (schedule.steps > 0 && schedule.decay_steps > schedule.steps)
        refuse("schedule.decay_steps = ", schedule.decay_steps, " is more than the run's ",
               schedule.steps, " steps; shorten the decay or lengthen the run");
    // Else the number of steps depends on the data, and on the batches that a resumed run had
    // before.
    if (schedule.steps == 0) return;
    const int64_t per_step = config_.batch.tokens_per_step, steps = schedule.steps;
    if (saturating_product(steps, per_step) == std::numeric_limits<int64_t>::max())
        refuse("schedule.steps = ", steps, " of batch.tokens_per_step = ", per_step,
               " tokens are more tokens than can be counted; lower one of them");
    if (schedule.warmup_steps > steps)
        refuse("schedule.warmup_steps = ", schedule.warmup_steps, " is more than the run's ", steps,
               " steps; shorten the warm-up or lengthen the run");
}

}  // namespace

void check_config(const Config& config, const std::string& name, int world) {
    Checks(config, name, world, true).all();
}

bool keeps_rules(const Config& config, int world) {
    try {
        Checks(config, "", world, false).all();
        if (world > 0) (void)mesh_of(config, world);
        return true;
    } catch (const Error&) {
        return false;
    }
}

}  // namespace train_gpt
