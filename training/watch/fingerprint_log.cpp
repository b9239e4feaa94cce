#include "training/watch/fingerprint_log.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/formatted.h"
#include "base/json_text.h"
#include "training/watch/step_lines.h"

namespace train_gpt {

namespace fs = std::filesystem;

namespace {

constexpr const char* fingerprints_name = "fingerprints.jsonl";

Json tensors_in(std::string_view line) {
    const Json json = try_parse_json(line);
    const bool has = json.is_object() && json.contains("tensors") && json["tensors"].is_object();
    return has ? json["tensors"] : Json::object();
}

/// The kinds of a line's fingerprints, in the order in which a step computes them.
std::vector<std::string> kinds_in(const Json& tensors) {
    std::vector<std::string> kinds;
    for (const auto& [name, hashes] : tensors.items())
        for (const auto& [kind, hash] : hashes.items())
            if (std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
    // The master is updated from the others.
    std::ranges::stable_partition(kinds, [](const std::string& kind) { return kind != "master"; });
    return kinds;
}

/// The value of a key; null if there is none.
Json value_of(const Json& json, const std::string& key) {
    return json.is_object() && json.contains(key) ? json[key] : Json();
}

}  // namespace

FingerprintLog::FingerprintLog(const fs::path& run_dir, std::optional<int64_t> resume_step,
                               bool wanted, bool writes) {
    if (!writes) return;
    keep_step_lines(run_dir / fingerprints_name, resume_step);
    if (wanted) file_.emplace(run_dir / fingerprints_name);
}

void FingerprintLog::write(int64_t step, const Fingerprints& of,
                           const Fingerprints::OfStep& taken) {
    if (!file_) return;
    const auto hex = [](uint64_t hash) {
        return formatted("%016llx", static_cast<unsigned long long>(hash));
    };
    Json line{{"step", step}, {"input", hex(taken.input)}, {"tensors", Json::object()}};
    for (const Fingerprints::OfTensor& tensor : taken.tensors) {
        Json hashes = Json::object();
        for (size_t k = 0; k < tensor.hashes.size(); ++k)
            hashes[of.kinds()[k]] = hex(tensor.hashes[k]);
        line["tensors"][tensor.name] = std::move(hashes);
    }
    file_->append(to_text(line) + '\n', "fingerprints are lost");
}

RecordedFingerprints::RecordedFingerprints(const fs::path& run_dir) {
    const fs::path path = run_dir / fingerprints_name;
    if (!fs::exists(path)) return;
    file_ = MappedFile(path);
    std::string_view text = file_.text();
    for (size_t end; (end = text.find('\n')) != std::string_view::npos;
         text.remove_prefix(end + 1)) {
        const std::string_view line = text.substr(0, end);
        const Json json = try_parse_json(line);
        if (json.is_object() && value_of(json, "step").is_number_integer())
            lines_[json["step"].get<int64_t>()] = line;
    }
}

std::string FingerprintDifference::described() const {
    if (tensor.empty()) return kind;
    return concat(kind, " of ", tensor,
                  others == 0   ? ""
                  : others == 1 ? " and another tensor"
                                : concat(" and ", others, " other tensors"));
}

std::optional<FingerprintDifference> first_difference(std::string_view a, std::string_view b) {
    if (a == b) return {};
    // Earlier versions recorded no input.
    const Json input_a = value_of(try_parse_json(a), "input"),
               input_b = value_of(try_parse_json(b), "input");
    if (!input_a.is_null() && !input_b.is_null() && input_a != input_b)
        return FingerprintDifference{"input", "", 0};
    const Json of_a = tensors_in(a), of_b = tensors_in(b);
    Json both = of_a;  // the tensors of either
    for (const auto& [name, hashes] : of_b.items())
        if (!both.contains(name)) both[name] = hashes;
    for (const std::string& kind : kinds_in(both)) {
        std::optional<FingerprintDifference> found;
        for (const auto& [name, hashes] : both.items())
            if (value_of(value_of(of_a, name), kind) != value_of(value_of(of_b, name), kind)) {
                if (found)
                    ++found->others;
                else
                    found = {kind, name, 0};
            }
        if (found) return found;
    }
    return {};
}

}  // namespace train_gpt
