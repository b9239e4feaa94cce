#include "training/files/optimizer_files.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "base/error.h"
#include "base/printable.h"
#include "training/files/stored_model.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char *range_prefix = "range/", *place_prefix = "place/", *coding_prefix = "coding/",
                     *scale_suffix = ".scale";

constexpr const char* name_of(Coding coding) {
    return coding == Coding::signs ? "signs" : coding == Coding::roots ? "roots" : "none";
}

/// As metadata, and with ':' as a part of a key.
std::string text_of(const ElementRuns& runs, char to) {
    std::string text = concat(runs.first, to, runs.first + runs.n);
    if (runs.count > 1) text += concat(",", runs.count, ",", runs.distance);
    return text;
}

std::string key_of(const Parameter& p, const ElementRuns& runs) {
    return runs == ElementRuns{0, p.numel()} ? p.name
                                             : concat(p.name, "[", text_of(runs, ':'), "]");
}

/// The reverse of text_of(). Throws Error that begins with `where` for what no tensor of n elements
/// has.
ElementRuns runs_of(const std::string& text, const Parameter& p, const std::string& where) {
    long long first = -1, end = -1, count = 1, distance = 0;
    const int read =
        std::sscanf(text.c_str(), "%lld-%lld,%lld,%lld", &first, &end, &count, &distance);
    const int64_t n = p.numel();
    const bool one = read == 2 && first >= 0 && first <= end && end <= n,
               several = read == 4 && first >= 0 && first < end && end <= n && count > 1 &&
                         distance >= end - first && (n - end) / distance >= count - 1;
    if (!one && !several)
        throw Error(where, " has the impossible range ", quoted(text), " for ", p.name,
                    ", a tensor of ", n, " elements");
    return {first, end - first, count, distance};
}

/// The logical elements of a piece, in memory.
Range held_range(const Parameter& p, const ParameterStore::Piece& piece) {
    return intersection(piece.range, {0, p.held_numel()});
}

}  // namespace

bool is_optimizer_file(const std::string& name) {
    return name.starts_with("optimizer-") && name.ends_with(".safetensors");
}

std::vector<ElementRuns> joined(std::span<const HeldRun> runs) {
    std::vector<ElementRuns> all;
    for (const HeldRun& run : runs) {
        if (!all.empty()) {
            ElementRuns& last = all.back();
            if (last.count == 1 && last.first + last.n == run.logical) {
                last.n += run.n;
                continue;
            }
            if (last.n == run.n && (last.count == 1 || run.logical == last.run(last.count).first)) {
                if (last.count++ == 1) last.distance = run.logical - last.first;
                continue;
            }
        }
        all.push_back({run.logical, run.n});
    }
    return all;
}

void write_optimizer_file(const fs::path& path, const ParameterStore& parameters,
                          const StateCopy* copy, const std::function<void()>& pulse) {
    struct Saved {
        int parameter;
        std::string key;
        ElementRuns runs;
        int64_t place;
    };
    std::vector<Saved> saved;
    std::vector<std::pair<int, int64_t>> held;  // parameters, and how many elements of them
    std::vector<const ParameterStore::Piece*> pieces;
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        if ((!p.is_part() && p.held_by.rank > 0) || !p.tied_to.empty()) continue;
        const std::vector<HeldRun> all = held_runs(p);
        std::vector<HeldRun> runs;
        for (const ParameterStore::Piece& piece : parameters.pieces_of(i)) {
            const std::vector<HeldRun> of_piece = runs_in_memory(all, held_range(p, piece));
            if (of_piece.empty()) continue;  // padding
            runs.insert(runs.end(), of_piece.begin(), of_piece.end());
            pieces.push_back(&piece);
        }
        int64_t place = 0;
        for (const ElementRuns& of_file : joined(runs)) {
            saved.push_back({i, key_of(p, of_file), of_file, place});
            place += of_file.numel();
        }
        if (place > 0) held.emplace_back(i, place);
    }
    std::vector<TensorInfo> tensors;
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    // The largest elements first: every tensor then begins at a multiple of its elements' size, as
    // other programs expect.
    std::vector<OptimizerSlot> states = parameters.state.saved();
    std::ranges::stable_sort(states, std::ranges::greater(),
                             [](const OptimizerSlot& state) { return size_of(state.dtype); });
    for (const OptimizerSlot& state : states) {
        const bool has_codes = state.coding != Coding::none;
        const auto add = [&](const std::string& key, int64_t n) {
            tensors.push_back(
                {.name = concat(state.name, "/", key),
                 .dtype = has_codes ? "U8" : names_of(stored_type_of(state.dtype)).safetensors,
                 .shape = {n}});
        };
        for (const Saved& s : saved) {
            if (!state.is_of_elements() || !parameters.has(state, s.parameter)) continue;
            add(s.key, s.runs.numel());
            if (has_codes) metadata[place_prefix + s.key] = std::to_string(s.place);
        }
        if (has_codes) metadata[coding_prefix + state.name] = name_of(state.coding);
        if (state.is_of_elements()) continue;
        // All pieces but a tensor's last one consist of whole blocks.
        for (const auto& [i, n] : held)
            add(parameters.parameters()[static_cast<size_t>(i)].name, state.count(n));
    }
    for (const Saved& s : saved) metadata[range_prefix + s.key] = text_of(s.runs, '-');
    SafetensorsWriter writer(path, std::move(tensors), metadata);
    std::vector<std::byte> copied;
    for (const OptimizerSlot& state : states)
        for (const ParameterStore::Piece* piece : pieces) {
            if (!parameters.has(state, piece->parameter)) continue;
            pulse();
            const Parameter& p = parameters.parameters()[static_cast<size_t>(piece->parameter)];
            const int64_t n = held_range(p, *piece).n;
            writer.append(copy ? copy->view(*piece, state.name, n)
                               : parameters.state.host_view(*piece, state.name, n, copied));
        }
    writer.commit();
}

void SavedElements::read(const OptimizerSlot& state, int64_t first, std::span<float> values) const {
    const std::vector<int64_t> shape{runs.numel()};
    const TensorInfo& info = file->at(concat(state.name, "/", key), shape);
    Coding coding = Coding::none;
    if (info.dtype == "U8") {
        const auto found = file->metadata().find(coding_prefix + state.name);
        const std::string word = found == file->metadata().end() ? "" : found->second;
        coding = word == name_of(Coding::roots) ? Coding::roots : Coding::signs;
        if (word != name_of(coding))
            throw Error(file->path().string(), ": tensor ", quoted(info.name), " has the coding ",
                        quoted(word),
                        ", which this version does not know; it reads signs and "
                        "roots");
        read_codes(state, info, coding, first, values);
    } else {
        file->read_floats(info, values.data(), first, std::ssize(values));
    }
    if (coding == Coding::roots && state.coding != Coding::roots)
        for (float& value : values) value *= value;
    if (state.coding == Coding::roots && coding != Coding::roots)
        for (float& value : values) value = std::sqrt(value);
}

void SavedElements::read_codes(const OptimizerSlot& state, const TensorInfo& info, Coding coding,
                               int64_t first, std::span<float> values) const {
    const std::string name = concat(state.name, scale_suffix, "/", key.substr(0, key.find('[')));
    const TensorInfo& scales = file->at(name);
    if (scales.dtype != "F32" || scales.numel() * code_block < place + runs.numel())
        throw Error(file->path().string(), ": tensor ", quoted(name), " has ", scales.numel(),
                    " numbers of dtype ", scales.dtype, ", but ", quoted(info.name), " needs ",
                    (place + runs.numel() + code_block - 1) / code_block, " of F32");
    const auto* const codes = reinterpret_cast<const uint8_t*>(file->data(info).data()) + first;
    for (int64_t done = 0; done < std::ssize(values);) {
        const int64_t at = place + first + done,
                      n = std::min(std::ssize(values) - done, code_block - at % code_block);
        float scale = 0;
        std::memcpy(&scale, file->data(scales).data() + at / code_block * sizeof scale,
                    sizeof scale);
        (coding == Coding::signs
             ? decode_block<Coding::signs>
             : decode_block<Coding::roots>)(codes + done, scale, n, values.data() + done);
        done += n;
    }
}

OptimizerFiles::OptimizerFiles(const fs::path& checkpoint, const std::vector<Parameter>& parameters)
    : saved_(parameters.size()) {
    for (size_t i = 0; i < parameters.size(); ++i) index_[parameters[i].name] = i;
    for (const auto& entry : fs::directory_iterator(checkpoint))
        if (is_optimizer_file(entry.path().filename().string())) open(entry.path(), parameters);
    if (files_.empty()) return;
    for (size_t i = 0; i < saved_.size(); ++i) {
        std::ranges::sort(saved_[i], {}, [](const SavedElements& s) { return s.runs.first; });
        int64_t held = 0;
        for (const SavedElements& saved : saved_[i]) held += saved.runs.numel();
        if (held != parameters[i].numel())
            throw Error("the optimizer files of ", checkpoint.string(), " hold ", held, " of the ",
                        parameters[i].numel(), " elements of ", parameters[i].name, ": ",
                        held < parameters[i].numel() ? "one of them is missing"
                                                     : "one of them is not of this checkpoint");
    }
}

void OptimizerFiles::open(const fs::path& path, const std::vector<Parameter>& parameters) {
    const SafetensorsFile& file = *files_.emplace_back(std::make_unique<SafetensorsFile>(path));
    for (const auto& [entry, text] : file.metadata()) {
        if (!entry.starts_with(range_prefix)) continue;
        const std::string key = entry.substr(std::strlen(range_prefix)),
                          name = key.substr(0, key.find('['));
        const auto found = index_.find(name);
        if (found == index_.end())
            throw Error(path.string(), " has a tensor ", quoted(name), " that this model has not");
        const auto place = file.metadata().find(place_prefix + key);
        saved_[found->second].push_back(
            {&file, key, runs_of(text, parameters[found->second], path.string()),
             place == file.metadata().end() ? 0
                                            : std::max(0LL, std::atoll(place->second.c_str()))});
    }
}

namespace {

/// Elements in a file, and where they go in memory.
struct Move {
    int64_t from = 0, to = 0, n = 0;
};

/// The saved elements that are in a piece of memory, whose runs are `held`; in ascending order.
std::vector<Move> moves_into(const std::vector<HeldRun>& held, const ElementRuns& saved) {
    std::vector<Move> moves;
    for (int64_t i = 0; i < saved.count; ++i)
        for (const HeldRun& run : runs_in_tensor(held, saved.run(i)))
            moves.push_back({i * saved.n + run.logical - saved.run(i).first, run.held, run.n});
    return moves;
}

}  // namespace

void OptimizerFiles::load(ParameterStore& parameters, const std::function<void()>& pulse) const {
    std::vector<float> values;
    const std::vector<OptimizerSlot> states = parameters.state.saved();
    for (int i = 0; i < static_cast<int>(parameters.parameters().size()); ++i) {
        const Parameter& p = parameters.parameters()[static_cast<size_t>(i)];
        const std::vector<SavedElements>& of_parameter = saved_[index_.at(p.name)];
        const std::vector<HeldRun> all = held_runs(p);
        for (const ParameterStore::Piece& piece : parameters.pieces_of(i)) {
            const std::vector<HeldRun> held = runs_in_memory(all, held_range(p, piece));
            for (const SavedElements& saved : of_parameter) {
                const std::vector<Move> moves = moves_into(held, saved.runs);
                for (const OptimizerSlot& state : states) {
                    if (!parameters.has(state, i) || !state.is_of_elements() ||
                        state.coding != Coding::none)
                        continue;
                    for (auto move = moves.begin(); move != moves.end();) {
                        // What is consecutive in memory is written at once.
                        if (pulse) pulse();
                        const int64_t begin = move->to;
                        values.clear();
                        for (; move != moves.end() && move->to == begin + std::ssize(values);
                             ++move) {
                            values.resize(values.size() + static_cast<size_t>(move->n));
                            saved.read(state, move->from,
                                       std::span(values).last(static_cast<size_t>(move->n)));
                        }
                        parameters.state.write_held(state.name, i, begin, values);
                    }
                }
            }
            // Blocks of codes are written whole, with the padding.
            for (const OptimizerSlot& state : states) {
                if (!parameters.has(state, i) || state.coding == Coding::none) continue;
                values.assign(static_cast<size_t>(piece.range.n), 0.0f);
                for (const SavedElements& saved : of_parameter)
                    for (const Move& move : moves_into(held, saved.runs)) {
                        if (pulse) pulse();
                        saved.read(state, move.from,
                                   std::span(values).subspan(
                                       static_cast<size_t>(move.to - piece.range.first),
                                       static_cast<size_t>(move.n)));
                    }
                parameters.state.write_held(state.name, i, piece.range.first, values);
            }
        }
    }
    parameters.state.clear_padding();
}

void OptimizerFiles::read_masters(int i, int64_t first, std::span<float> values) const {
    const Range wanted{first, std::ssize(values)};
    for (const SavedElements& saved : saved_[static_cast<size_t>(i)]) {
        const ElementRuns& runs = saved.runs;
        // The runs that end after the first wanted element, up to the last one
        int64_t run = runs.count == 1 || first < runs.first + runs.n
                          ? 0
                          : (first - runs.first - runs.n) / runs.distance + 1;
        for (; run < runs.count && runs.run(run).first < wanted.end(); ++run) {
            const Range part = intersection(runs.run(run), wanted);
            if (part.n > 0)
                saved.read({.name = std::string(ParameterState::master)},
                           run * runs.n + part.first - runs.run(run).first,
                           values.subspan(static_cast<size_t>(part.first - first),
                                          static_cast<size_t>(part.n)));
        }
    }
}

}  // namespace train_gpt
