#include "dataloader/prepare.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <exception>
#include <future>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/stopwatch.h"
#include "dataloader/document_finder.h"
#include "dataloader/documents.h"
#include "dataloader/manifest.h"
#include "dataloader/ordered_work.h"
#include "dataloader/reporter.h"
#include "dataloader/split_writer.h"
#include "dataloader/tail_split.h"
#include "dataloader/workplace.h"
#include "tokenizer/formats.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/word_counts.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

const char* purpose_of(Split split) { return split == Split::train ? "training" : "validation"; }

/// Whether encodable_piece() is valid for this tokenizer. It is not if the tokenizer puts a space
/// before every text, if it is not known that its patterns end pieces at encodable cuts, or if an
/// added token spans one, such as a line boundary.
bool encodes_in_pieces(const Tokenizer& tokenizer) {
    if (!std::ranges::all_of(tokenizer.patterns(), respects_encodable_cuts)) return false;
    if (tokenizer.decode(tokenizer.encode("x")) != "x") return false;
    for (uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        const std::string inside = concat("x", tokenizer.token_bytes(id), "x");
        for (size_t at = 2; at + 1 < inside.size(); ++at)
            if (is_encodable_cut(inside, at)) return false;
    }
    return true;
}

/// Names the first item that was left out: "line 6 of a.jsonl", or "a.gz".
std::string first_of(const LeftOut& left) {
    const std::string name = left.path == "-" ? "standard input" : left.path;
    if (left.line == 0) return name;
    return concat(name_of(left.record), " ", left.line, " of ", name);
}

std::string in_brackets(const std::string& detail) {
    return detail.empty() ? "" : " (" + detail + ")";
}

/// Names the line of the first byte that is not UTF-8: "line 6 of a.txt".
std::string first_not_utf8(const PreparedSource& source) {
    return first_of({"", 1, source.path, source.first_not_utf8_line});
}

void check(const PrepareOptions& o) {
    if (o.texts.empty()) throw UsageError("no text was given; name at least one text file");
    if (o.out.empty()) throw UsageError("no folder was given for the tokens; give --out DIR");
    if ((o.train_vocab == 0) == o.tokenizer.empty())
        throw UsageError(
            "give either --train-vocab N to train a tokenizer or --tokenizer DIR to use one");
    if (o.train_vocab > 0 && std::count(o.texts.begin(), o.texts.end(), "-") > 0)
        throw UsageError(
            "--train-vocab reads the text twice, but standard input (-) can be read only once; "
            "write "
            "the text to a file, or use a vocabulary with --tokenizer");
    if (o.train_vocab > 0 && !(o.begin_token.empty() && o.end_token.empty()))
        throw UsageError(
            "--begin-token and --end-token choose among the special tokens of a --tokenizer; one "
            "that is trained has only <|endoftext|>, which ends documents");
    if (!(o.val_fraction >= 0 && o.val_fraction <= 0.5) && o.val_fraction != 1)
        throw UsageError(
            "--val-fraction is ", o.val_fraction,
            ", but must lie between 0 and 0.5, or be 1 to use all text for validation");
    if (o.val_fraction == 1 && o.train_vocab > 0)
        throw UsageError(
            "--val-fraction 1 leaves no text to train a vocabulary on; name one with --tokenizer");
    if (!o.val_split.empty() && o.val_split != "documents" && o.val_split != "tail")
        throw UsageError("--val-split is \"", o.val_split, "\", but must be documents or tail");
    if (o.shard_tokens < 2)
        throw UsageError("--shard-tokens is ", o.shard_tokens, ", but must be at least 2");
    if (o.threads < 0)
        throw UsageError("--threads is ", o.threads, ", but must be 0 (all) or more");
    if (o.train_vocab > 0 && (o.train_vocab < min_trained_vocab || o.train_vocab > max_vocab_size))
        throw UsageError("--train-vocab is ", o.train_vocab, ", but must lie between ",
                         min_trained_vocab, " (the 256 bytes and <|endoftext|>) and ",
                         max_vocab_size);
}

bool same_file(const fs::path& a, const fs::path& b) {
    std::error_code code;
    return fs::equivalent(a, b, code) && !code;
}

/// The work of prepare() on the sources it has found.
class Preparation {
  public:
    Preparation(const PrepareOptions& options, Sources found, std::FILE* log,
                const std::function<bool()>& interrupted)
        : options_(options),
          found_(std::move(found)),
          sources_(found_.sources),
          interrupted_(interrupted),
          report_(log, options.report_seconds, sources_),
          threads_(options.threads > 0
                       ? options.threads
                       : std::max(1, static_cast<int>(std::thread::hardware_concurrency()))),
          out_(options.out) {}

    bool run();

  private:
    struct Stopped {};

    void describe_inputs();
    void describe_earlier_run();
    void choose_split();
    bool hold_single_text();
    PreparationState begin_state() const;
    DocumentFinder finder() const {
        return {sources_, options_.field, options_.val_fraction, options_.skip_bad};
    }
    void note_faults(const PreparationState& state, const Batch& batch, const Outcome& outcome);
    Plan plan(const std::optional<Tokenizer>& given) const;
    Tokenizer train_tokenizer();
    DataManifest encode(const Tokenizer& tokenizer, Workplace& workplace);
    DataManifest manifest_of(const Tokenizer& tokenizer, const PreparationState& state) const;
    void save(const PreparationState& state, Workplace& workplace,
              std::array<SplitWriter, 2>& writers) const;
    void check_lengths(const std::array<int64_t, 2>& lengths, int64_t bytes, int64_t documents,
                       const std::vector<LeftOut>& left_out) const;
    void compare_share(const PreparationState& state);
    /// Whether --val-split tail can take the end of the text.
    bool can_cut() const { return std::ranges::all_of(sources_, &Source::is_plain_file); }
    void describe(const PreparationState& state);
    bool has_left_out(const Workplace& workplace) const;

    /// Reads everything from `state` on. Each thread does the work that its own call of make_work()
    /// returns; then done(batch, outcome) is called in the order of the text. Throws Stopped when
    /// the user wants to stop, at a position from which a run can resume.
    template <class Done>
    void read(const PreparationState& state, bool cuttable,
              std::function<OrderedWork<Outcome>::Work()> make_work, Done&& done) {
        DocumentStream stream(sources_, {options_.val_fraction, cut_, cuttable, options_.skip_bad},
                              state.position, std::min(threads_, 8));
        OrderedWork<Outcome> work(stream, threads_, std::move(make_work));
        Batch batch;
        Outcome outcome;
        for (bool can_stop = true;;) {
            const auto next = work.next(batch, outcome);
            if (next == OrderedWork<Outcome>::Next::end) break;
            if (next == OrderedWork<Outcome>::Next::result) {
                done(batch, outcome);
                can_stop = batch.can_restart || batch.last;
            }
            if (can_stop && interrupted_ && interrupted_()) throw Stopped();
        }
    }

    const PrepareOptions& options_;
    Sources found_;
    std::vector<Source>& sources_;
    const std::function<bool()>& interrupted_;
    Reporter report_;
    const int threads_;
    const fs::path out_;
    std::string val_split_;
    std::optional<int64_t> cut_;  // with --val-split tail
    bool keeps_tokenizer_ = false;
    bool said_not_utf8_ = false, said_crlf_ = false;
};

/// Reports what is left out of the inputs. Throws Error if all of them are empty files.
void Preparation::describe_inputs() {
    if (!found_.skipped.empty())
        report_.say("left out of the folders, since their extensions are not those of texts: ",
                    train_gpt::describe(found_.skipped));
    if (found_.hidden.count > 0)
        report_.say(
            "left out of the folders, since their names begin with a dot: ", found_.hidden.count,
            found_.hidden.count == 1 ? " entry, " : " entries, first ", found_.hidden.first);
    if (found_.objects.count > 0)
        report_.say("note: ", found_.objects.first,
                    found_.objects.count == 1
                        ? " begins"
                        : concat(" and ", found_.objects.count - 1, " more begin"),
                    " with an object in JSON and ", found_.objects.count == 1 ? "is" : "are",
                    " read as plain text, as the name says");
    int64_t bytes = 0;
    for (const Source& source : sources_) {
        bytes += source.size;
        if (source.size == 0 && source.path != "-" && source.compression == Compression::none)
            report_.say(source.path, " is empty and was left out");
    }
    if (std::ranges::none_of(sources_, [](const Source& source) { return source.path == "-"; }))
        check_lengths({2, 2}, bytes, 0, {});
}

/// If all text is in one compressed file or comes from standard input, holds it in memory if it
/// fits and --val-split tail may apply to it. Returns whether all of it is held. Throws Stopped.
bool Preparation::hold_single_text() {
    Source* const single = find_single_text(sources_);
    if (!single || only_split(options_.val_fraction)) return false;
    std::atomic<bool> stop{false};
    auto reading = std::async(std::launch::async, [&] {
        return hold_text(*single, options_.val_split != "tail", options_.skip_bad, stop);
    });
    while (reading.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready)
        if (interrupted_ && interrupted_()) {
            stop = true;
            reading.wait();
            throw Stopped();
        }
    return reading.get();
}

/// Chooses the rule for the split and, for "tail", where the end of the text begins.
void Preparation::choose_split() {
    val_split_ = options_.val_split;
    if (val_split_ == "documents") return;
    const bool held = hold_single_text();
    if (val_split_.empty())
        val_split_ = held || is_single_document(sources_) ? "tail" : "documents";
    if (val_split_ == "tail") {
        const auto other = std::ranges::find_if_not(sources_, &Source::is_plain_file);
        if (!held && other != sources_.end())
            throw UsageError(
                "--val-split tail needs plain text files, or a single compressed or piped text of "
                "at "
                "most ",
                max_document_bytes >> 20, " MiB, but ", other->name(),
                " is neither; unpack it into a file, or use --val-split documents");
        cut_ = tail_begin(sources_, options_.val_fraction);
    }
    for (Source& source : sources_)
        if (source.path != "-") source.held = nullptr;  // it can be read again
}

/// Everything that the shards depend on.
Plan Preparation::plan(const std::optional<Tokenizer>& given) const {
    std::string inputs;
    for (const Source& source : sources_)
        inputs += concat(source.path, " ", source.size, " ", source.modified, "\n");
    return {{"format", "train_gpt tokenize 3"},
            {"tokenizer", given ? given->to_json() : concat("of ", options_.train_vocab)},
            {"field", options_.field},
            {"val_split", val_split_},
            {"val_fraction", format("%.17g", options_.val_fraction)},
            {"shard_tokens", concat(options_.shard_tokens)},
            {"inputs", inputs}};
}

void Preparation::check_lengths(const std::array<int64_t, 2>& lengths, int64_t bytes,
                                int64_t documents, const std::vector<LeftOut>& left_out) const {
    if (bytes == 0 && !left_out.empty())
        throw Error(
            "nothing is left of the text: ", first_of(left_out.front()), " ",
            left_out.front().reason, in_brackets(left_out.front().detail),
            left_out.size() > 1 || left_out.front().count > 1 ? ", and more was left out after it"
                                                              : "",
            "; fix it", left_out.front().line > 0 ? ", or name the --field that has the text" : "");
    if (bytes == 0)
        throw Error("the text in ", sources_.front().name(),
                    sources_.size() > 1 ? " and the other inputs" : "",
                    " is empty; name a file with text in it");
    for (const Split split : splits) {
        const int64_t length = lengths[index_of(split)];
        const auto only = only_split(options_.val_fraction);
        if (length >= 2 || (only && split != *only)) continue;
        throw Error("of the text (", bytes, " bytes, ", documents,
                    documents == 1 ? " document" : " documents", ") ",
                    length == 0 ? "nothing" : "only one token", " is left for ", purpose_of(split),
                    " with --val-split ", val_split_, " and --val-fraction ", options_.val_fraction,
                    "; use more text, another --val-fraction (0: no validation)",
                    val_split_ != "documents" ? ""
                    : can_cut()               ? ", or --val-split tail"
                                              : ", or --val-split tail with plain text files");
    }
}

/// Reports a validation share far from the one that was asked for. This happens with few or very
/// long documents, because a document belongs to one split as a whole.
void Preparation::compare_share(const PreparationState& state) {
    const double wanted = options_.val_fraction;
    const double share = static_cast<double>(state.bytes[index_of(Split::val)]) /
                         static_cast<double>(state.bytes[0] + state.bytes[1]);
    if (only_split(wanted) || (share < 2 * wanted && share > wanted / 2)) return;
    report_.say("note: validation has ", format("%.1f", 100 * share), " % of the text, not ",
                format("%.1f", 100 * wanted),
                " %: documents stay whole, and there are few of them or their lengths differ much",
                can_cut() ? "; --val-split tail takes the end of the text instead" : "");
}

/// The state before anything is read.
PreparationState Preparation::begin_state() const {
    PreparationState state;
    for (const Source& source : sources_) state.sources.push_back({source.path, 0, 0, ""});
    if (!found_.not_text.empty())
        add(state.left_out, {reason_no_text, std::ssize(found_.not_text), found_.not_text.front()});
    return state;
}

/// Reports what the text should not have, when it is first seen.
void Preparation::note_faults(const PreparationState& state, const Batch& batch,
                              const Outcome& outcome) {
    const Source& source = sources_[batch.source];
    if (outcome.not_utf8 > 0 && !std::exchange(said_not_utf8_, true)) {
        const PreparedSource& read = state.sources[batch.source];
        report_.say(
            "note: ", source.name(), " is not UTF-8 everywhere: byte ", read.first_not_utf8 + 1,
            ", in line ", read.first_not_utf8_line, ", is ",
            format("0x%02X", static_cast<unsigned char>((*batch.storage)[*outcome.first_not_utf8])),
            "; such bytes are kept as they are; text in another encoding should be turned "
            "into UTF-8 before: iconv -f ENCODING -t UTF-8");
    }
    if (outcome.has_crlf && !std::exchange(said_crlf_, true))
        report_.say("note: lines of ", source.name(),
                    " end in CR LF, as Windows writes them; both characters are kept and become "
                    "tokens (to have LF alone: tr -d '\\r')");
}

Tokenizer Preparation::train_tokenizer() {
    PreparationState state = begin_state();
    std::vector<std::unique_ptr<WordCounts>> counts;
    std::mutex mutex;
    const Pattern pattern = TrainOptions().pattern;
    report_.begin("counting words", 0);
    read(
        state, true,
        [&]() -> OrderedWork<Outcome>::Work {
            const std::lock_guard lock(mutex);
            WordCounts* mine = counts.emplace_back(std::make_unique<WordCounts>(pattern)).get();
            auto finder = std::make_shared<DocumentFinder>(this->finder());
            return [mine, finder](const Batch& batch) {
                Outcome outcome;
                finder->find(batch, outcome,
                             [mine](Split split, std::string_view text, bool, bool) {
                                 if (split == Split::train) mine->add(text);
                             });
                return outcome;
            };
        },
        [&](const Batch& batch, const Outcome& outcome) {
            count(state, batch, outcome);
            note_faults(state, batch, outcome);
            report_.count(batch, batch.bytes(), 0);
        });
    check_lengths(state.bytes, state.bytes[0] + state.bytes[1],
                  state.documents[0] + state.documents[1], state.left_out);
    WordCounts all(pattern);
    for (const auto& part : counts) all.merge(std::move(*part));
    Tokenizer tokenizer = Tokenizer::train(all, options_.train_vocab);
    if (tokenizer.vocab_size() < options_.train_vocab)
        report_.say(
            "note: the vocabulary has ", tokenizer.vocab_size(), " tokens, not ",
            options_.train_vocab, ": with these, each of the ", all.size(),
            " different words of the training text is one token, and there is nothing left to "
            "merge; a larger vocabulary needs more text");
    return tokenizer;
}

void Preparation::save(const PreparationState& state, Workplace& workplace,
                       std::array<SplitWriter, 2>& writers) const {
    for (SplitWriter& writer : writers) writer.sync();
    write_progress(workplace.staging() / progress_file, state);
    workplace.keep();
}

DataManifest Preparation::encode(const Tokenizer& tokenizer, Workplace& workplace) {
    const fs::path& staging = workplace.staging();
    PreparationState state = begin_state();
    if (workplace.has(progress_file)) {
        state = read_progress(staging / progress_file, sources_.size());
        for (const PreparedSource& source : state.sources) said_not_utf8_ |= source.not_utf8 > 0;
        report_.say("continuing after ", state.tokens(Split::train) + state.tokens(Split::val),
                    " tokens of an interrupted run");
    }
    const auto name = [&](std::optional<uint32_t> id) {
        return id ? std::string(tokenizer.token_bytes(*id)) : "nothing";
    };
    if (tokenizer.begin_of_text())
        report_.say("documents begin with ", name(tokenizer.begin_of_text()), " and end with ",
                    name(tokenizer.end_of_text()));
    else if (options_.train_vocab == 0 && tokenizer.end_of_text())
        report_.say("documents end with ", name(tokenizer.end_of_text()));
    else if (!tokenizer.end_of_text())
        report_.say(
            "the tokenizer has no end-of-text token, so nothing marks where documents end; "
            "name one of its special tokens with --end-token");

    std::array<SplitWriter, 2> writers{
        SplitWriter(staging, Split::train, tokenizer, options_.shard_tokens, state.shards[0]),
        SplitWriter(staging, Split::val, tokenizer, options_.shard_tokens, state.shards[1])};
    report_.begin("encoding", state.position.source);
    Stopwatch since_saved;
    try {
        read(
            state, encodes_in_pieces(tokenizer),
            [&]() -> OrderedWork<Outcome>::Work {
                auto finder = std::make_shared<DocumentFinder>(this->finder());
                auto encoder = std::make_shared<Encoder>(tokenizer);
                return [finder, encoder, begin = tokenizer.begin_of_text(),
                        end = tokenizer.end_of_text()](const Batch& batch) {
                    Outcome outcome;
                    finder->find(batch, outcome,
                                 [&](Split split, std::string_view text, bool begins, bool ends) {
                                     std::vector<uint32_t>& tokens =
                                         outcome.tokens[index_of(split)];
                                     if (begins && begin) tokens.push_back(*begin);
                                     encoder->encode(text, tokens);
                                     if (ends && end) tokens.push_back(*end);
                                 });
                    return outcome;
                };
            },
            [&](const Batch& batch, const Outcome& outcome) {
                for (const Split split : splits)
                    writers[index_of(split)].append(outcome.tokens[index_of(split)]);
                count(state, batch, outcome);
                note_faults(state, batch, outcome);
                if (!batch.damage.empty())
                    report_.say(batch.damage,
                                "; what follows is left out, and what comes before may be wrong");
                report_.count(batch, batch.bytes(),
                              state.tokens(Split::train) + state.tokens(Split::val));
                if ((batch.can_restart || batch.last) &&
                    since_saved.seconds() >= options_.save_seconds) {
                    save(state, workplace, writers);
                    since_saved.restart();
                }
            });
    } catch (const Stopped&) {
        save(state, workplace, writers);
        report_.say("stopped after ", state.tokens(Split::train) + state.tokens(Split::val),
                    " tokens, which are kept in ", staging.string(),
                    "; the same command resumes from there");
        throw;
    }
    for (SplitWriter& writer : writers) writer.finish();
    describe(state);
    try {
        check_lengths({state.tokens(Split::train), state.tokens(Split::val)},
                      state.bytes[0] + state.bytes[1], state.documents[0] + state.documents[1],
                      state.left_out);
    } catch (const Error&) {
        workplace.drop();
        throw;
    }
    compare_share(state);
    return manifest_of(tokenizer, state);
}

DataManifest Preparation::manifest_of(const Tokenizer& tokenizer,
                                      const PreparationState& state) const {
    DataManifest manifest;
    manifest.complete = true;
    manifest.vocab_size = tokenizer.vocab_size();
    manifest.tokenizer = tokenizer_file;
    manifest.val_fraction = options_.val_fraction;
    manifest.val_split = val_split_;
    manifest.train_documents = state.documents[0];
    manifest.val_documents = state.documents[1];
    for (const Split split : splits)
        manifest.shards.insert(manifest.shards.end(), state.shards[index_of(split)].begin(),
                               state.shards[index_of(split)].end());
    manifest.sources = state.sources;
    manifest.left_out = state.left_out;
    return manifest;
}

void Preparation::describe(const PreparationState& state) {
    for (const Split split : splits) {
        const auto& shards = state.shards[index_of(split)];
        const int64_t tokens = state.tokens(split);
        if (tokens == 0) continue;
        report_.say(name_of(split), ": ", tokens, " tokens (",
                    format("%.2f", static_cast<double>(state.bytes[index_of(split)]) /
                                       static_cast<double>(tokens)),
                    " bytes each) in ", shards.size(), shards.size() == 1 ? " shard" : " shards");
    }
    for (const LeftOut& left : state.left_out) {
        const char* what = left.line == 0 ? "file" : name_of(left.record);
        report_.say("left out: ", left.reason == reason_damaged ? "the rest of " : "", left.count,
                    " ", what, left.count == 1 ? " that " : "s, each of which ", left.reason,
                    ", first ", first_of(left), in_brackets(left.detail));
    }
    int64_t nulls = 0;
    for (const PreparedSource& source : state.sources) nulls += source.nulls;
    if (nulls > 0)
        report_.say("left out: ", nulls, nulls == 1 ? " row" : " rows",
                    " of Parquet without a text (null)");
    int64_t files = 0, bytes = 0;
    const PreparedSource* first = nullptr;
    for (const PreparedSource& source : state.sources) {
        if (source.not_utf8 == 0) continue;
        if (!first) first = &source;
        ++files;
        bytes += source.not_utf8;
    }
    if (first)
        report_.say("not UTF-8: ", bytes, bytes == 1 ? " byte" : " bytes", " in ", files,
                    files == 1 ? " file" : " files", ", first in ", first_not_utf8(*first),
                    "; kept as they are");
}

/// Whether an interrupted run left something out, which only --skip-bad permits.
bool Preparation::has_left_out(const Workplace& workplace) const {
    if (workplace.has(data_manifest))
        return !read_data_manifest(workplace.staging()).left_out.empty();
    return workplace.has(progress_file) &&
           !read_progress(workplace.staging() / progress_file, sources_.size()).left_out.empty();
}

/// Reports that this run replaces the shards of an earlier one.
void Preparation::describe_earlier_run() {
    if (!fs::exists(out_ / data_manifest)) return;
    const DataManifest earlier = read_data_manifest(out_);
    if (!earlier.complete || earlier.shards.empty()) return;
    int64_t tokens = 0;
    for (const PreparedShard& shard : earlier.shards) tokens += shard.tokens;
    report_.say(out_.string(), " has ", tokens, " tokens in ", earlier.shards.size(),
                earlier.shards.size() == 1 ? " shard" : " shards",
                " from an earlier run of this command; this run replaces them when it is complete");
}

bool Preparation::run() {
    describe_inputs();
    try {
        choose_split();
    } catch (const Stopped&) {
        report_.say("stopped before the text was read; the same command starts again");
        return false;
    }

    // If the tokenizer to use is the one in the output folder, it is left as it is.
    const fs::path in_place = out_ / tokenizer_file;
    const bool as_it_is = options_.begin_token.empty() && options_.end_token.empty();
    keeps_tokenizer_ = !options_.tokenizer.empty() && as_it_is &&
                       (same_file(options_.tokenizer, in_place) ||
                        same_file(fs::path(options_.tokenizer) / tokenizer_file, in_place));
    std::optional<Tokenizer> tokenizer;
    if (!options_.tokenizer.empty())
        tokenizer = Tokenizer::load(options_.tokenizer)
                        .with_document_tokens(options_.begin_token, options_.end_token);

    Workplace workplace(out_);
    const std::set<std::string> old = replaceable(out_, keeps_tokenizer_);
    describe_earlier_run();
    const fs::path& staging = workplace.staging();
    if (const std::string change = workplace.open(plan(tokenizer)); !change.empty())
        report_.say("an interrupted run in ", out_.string(), " cannot continue, since its ", change,
                    change.ends_with('s') ? " were" : " was", " different; starting again");
    if (!options_.skip_bad && has_left_out(workplace)) {
        report_.say("an interrupted run in ", out_.string(),
                    " left out bad input because of --skip-bad; starting again without it");
        workplace.begin_anew(plan(tokenizer));
    }
    if (workplace.has(data_manifest) &&
        !can_publish(staging, out_, read_data_manifest(staging), keeps_tokenizer_)) {
        report_.say("shards of an interrupted run are missing in ", out_.string(),
                    "; starting again");
        workplace.begin_anew(plan(tokenizer));
    }

    DataManifest manifest;
    if (workplace.has(data_manifest)) {
        manifest = read_data_manifest(staging);
        report_.say("an interrupted run had made all shards");
    } else {
        try {
            const Stopwatch training;
            const char* how = "loaded";
            if (!tokenizer && workplace.has(tokenizer_file)) {
                tokenizer = Tokenizer::load(staging / tokenizer_file);
                how = "trained on the training text by an interrupted run, and loaded";
            } else if (!tokenizer) {
                tokenizer = train_tokenizer();
                how = "trained on the training text";
            }
            report_.say("tokenizer: ", tokenizer->vocab_size(), " tokens, ", how, " in ",
                        format("%.1f s", training.seconds()));
            if (!keeps_tokenizer_ && !workplace.has(tokenizer_file))
                tokenizer->save(staging / tokenizer_file);
            if (options_.train_vocab > 0) workplace.keep();
            manifest = encode(*tokenizer, workplace);
        } catch (const Stopped&) {
            if (!workplace.has(tokenizer_file))
                report_.say(
                    "stopped before the vocabulary was trained; the same command starts again");
            return false;
        }
        manifest.tokenizer_hash = hash_file(keeps_tokenizer_ ? in_place : staging / tokenizer_file);
        write_data_manifest(staging, manifest);
        sync_directory(staging);
        workplace.keep();
    }
    publish(staging, out_, manifest, old, keeps_tokenizer_);
    workplace.drop();
    report_.say("wrote ", out_.string());
    return true;
}

}  // namespace

bool prepare(const PrepareOptions& options, std::FILE* log,
             const std::function<bool()>& interrupted) {
    check(options);
    return Preparation(options, find_sources(options.texts, options.field, options.skip_bad), log,
                       interrupted)
        .run();
}

}  // namespace train_gpt
