#include "model/families/rope_config.h"

#include <optional>
#include <string>
#include <utility>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr const char* old_key = "rope_scaling";
constexpr const char* new_key = "rope_parameters";
constexpr const char* context_key = "original_max_position_embeddings";

/// Reads the two objects that may describe the rotation. Errors name the file, the object and the
/// key.
class RopeReader {
  public:
    /// Both must outlive this.
    RopeReader(const Json& json, const std::filesystem::path& path) : json_(json), path_(path) {}

    /// Without entries where it is missing or null.
    Json object(const char* key) const {
        if (!json_.contains(key) || json_[key].is_null()) return Json::object();
        const Json& rope = json_[key];
        if (!rope.is_object())
            refuse(key, " = ", to_text(rope), R"(; it must be null or an object, such as )",
                   R"({"rope_type": "linear", "factor": 2.0})");
        for (const auto& [name, value] : rope.items())
            if (value.is_object())
                refuse(key, " for ", to_text(name),
                       "; only one rotation for all layers is supported");
        if (optional_field(rope, "partial_rotary_factor", 1.0, path_) != 1)
            refuse(key, " with partial_rotary_factor = ", to_text(rope["partial_rotary_factor"]),
                   "; only 1 is supported");
        return rope;
    }

    RopeFrequencies scaling(const char* key, const Json& rope) const {
        RopeFrequencies scaling;
        const std::string type = type_of(key, rope);
        if (type == "default") return scaling;
        const auto number = [&](const char* name) { return field<double>(rope, name, path_); };
        if (type == "linear") {
            scaling.scaling = RopeScaling::linear;
            scaling.factor = number("factor");
        } else if (type == "llama3") {
            scaling.scaling = RopeScaling::llama3;
            scaling.factor = number("factor");
            scaling.low_frequency_factor = number("low_freq_factor");
            scaling.high_frequency_factor = number("high_freq_factor");
            scaling.original_context = original_context(key, rope);
        } else if (type == "yarn") {
            scaling.scaling = RopeScaling::yarn;
            scaling.factor = number("factor");
            scaling.original_context = original_context(key, rope);
            scaling.yarn = yarn(key, rope);
        } else {
            refuse(key, " of the type ", to_text(type),
                   R"(; only "default", "linear", "llama3" and "yarn" are supported)");
        }
        return scaling;
    }

    std::optional<double> theta(const Json& place) const {
        if (!place.contains("rope_theta") || place["rope_theta"].is_null()) return {};
        const auto theta = field<double>(place, "rope_theta", path_);
        if (!(theta > 0)) refuse("rope_theta = ", theta, "; it must be above 0");
        return theta;
    }

    template <class... What>
    [[noreturn]] void refuse(const What&... what) const {
        throw Error(path_.string(), " has ", what...);
    }

  private:
    std::string type_of(const char* key, const Json& rope) const {
        const auto old_name = optional_field<std::string>(rope, "type", "", path_);
        const auto type = optional_field(rope, "rope_type", old_name, path_);
        if (!old_name.empty() && old_name != type)
            refuse(key, " with type = ", to_text(old_name), " and rope_type = ", to_text(type),
                   ", of which versions of transformers take one or the other; remove one");
        if (type.empty() && rope.contains("factor"))
            refuse(key, " with a factor, but no rope_type; add it, or remove the factor");
        return type.empty() ? "default" : type;
    }

    Yarn yarn(const char* key, const Json& rope) const {
        Yarn yarn;
        const auto number = [&](const char* name) {
            return optional_field(rope, name, 0.0, path_);
        };
        // 0 is transformers' default, as null and a missing entry are.
        if (const double beta = number("beta_fast"); beta != 0) yarn.beta_fast = beta;
        if (const double beta = number("beta_slow"); beta != 0) yarn.beta_slow = beta;
        yarn.truncate = optional_field(rope, "truncate", yarn.truncate, path_);
        yarn.attention_factor = number("attention_factor");
        if (yarn.attention_factor == 0 && rope.contains("attention_factor") &&
            !rope["attention_factor"].is_null())
            refuse(key, " with attention_factor = 0, which makes all scores 0; remove it, and it ",
                   "follows from the factor");
        yarn.mscale = number("mscale"), yarn.mscale_all_dim = number("mscale_all_dim");
        return yarn;
    }

    /// Beside the object or in it, else the model's context.
    int64_t original_context(const char* key, const Json& rope) const {
        const auto context = optional_field<int64_t>(json_, "max_position_embeddings", 0, path_);
        const auto beside = optional_field<int64_t>(json_, context_key, 0, path_);
        const auto inside = optional_field<int64_t>(rope, context_key, 0, path_);
        if (beside != 0 && inside != 0 && beside != inside)
            refuse(context_key, " = ", beside, ", but ", inside, " in ", key,
                   "; versions of transformers take one or the other, so remove one");
        return beside != 0 ? beside : inside != 0 ? inside : context;
    }

    const Json& json_;
    const std::filesystem::path& path_;
};

Json rope_of(const RopeFrequencies& rope) {
    if (rope.scaling == RopeScaling::none) return {{"rope_type", "default"}};
    if (rope.scaling == RopeScaling::linear)
        return {{"rope_type", "linear"}, {"factor", rope.factor}};
    if (rope.scaling == RopeScaling::yarn) {
        Json json = {{"rope_type", "yarn"},
                     {"factor", rope.factor},
                     {"beta_fast", rope.yarn.beta_fast},
                     {"beta_slow", rope.yarn.beta_slow},
                     {"truncate", rope.yarn.truncate},
                     {context_key, rope.original_context}};
        for (const auto& [name, value] : {std::pair("attention_factor", rope.yarn.attention_factor),
                                          {"mscale", rope.yarn.mscale},
                                          {"mscale_all_dim", rope.yarn.mscale_all_dim}})
            if (value != 0) json[name] = value;
        return json;
    }
    return {{"rope_type", "llama3"},
            {"factor", rope.factor},
            {"low_freq_factor", rope.low_frequency_factor},
            {"high_freq_factor", rope.high_frequency_factor},
            {context_key, rope.original_context}};
}

}  // namespace

void read_rope(const Json& json, const std::filesystem::path& path, DecoderSettings& settings,
               double default_theta) {
    const RopeReader reader(json, path);
    const Json of_old = reader.object(old_key), of_new = reader.object(new_key);
    const RopeFrequencies old_scaling = reader.scaling(old_key, of_old),
                          new_scaling = reader.scaling(new_key, of_new);

    // transformers 5 replaces all of rope_parameters by a rope_scaling that says anything.
    const bool takes_old = !of_old.empty();
    settings.rope_scaling = takes_old ? old_scaling : new_scaling;
    if (takes_old && new_scaling.scaling != RopeScaling::none && new_scaling != old_scaling)
        reader.refuse(old_key, " = ", to_text(of_old), " and ", new_key, " = ", to_text(of_new),
                      ", which differ; transformers ignores the second; remove one");

    const std::optional<double> top = reader.theta(json), in_old = reader.theta(of_old),
                                in_new = reader.theta(of_new);
    const std::optional<double> inside = takes_old ? in_old : in_new;
    settings.rope_theta = inside.value_or(top.value_or(default_theta));
    for (const auto& [theta, place] :
         {std::pair{top, ""}, {in_old, " in rope_scaling"}, {in_new, " in rope_parameters"}})
        if (theta && *theta != settings.rope_theta)
            reader.refuse("rope_theta = ", *theta, place, ", but transformers 5 takes ",
                          settings.rope_theta,
                          inside ? concat(" from ", takes_old ? old_key : new_key)
                          : top  ? ""
                                 : ", its default, as rope_scaling replaces rope_parameters",
                          "; set rope_theta to one value everywhere");
}

void write_rope(const DecoderSpec& spec, Json& json) {
    Json rope = rope_of(spec.rope);
    json["rope_theta"] = spec.rope.theta;
    json[old_key] = spec.rope.scaling == RopeScaling::none ? Json(nullptr) : rope;
    rope["rope_theta"] = spec.rope.theta;
    json[new_key] = rope;
}

}  // namespace train_gpt
