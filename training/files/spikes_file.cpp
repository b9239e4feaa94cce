#include "training/files/spikes_file.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"
#include "base/json_text.h"

namespace train_gpt {

namespace {

constexpr const char* spikes_name = "spikes.json";

}  // namespace

std::string write_spikes(const std::filesystem::path& checkpoint, const SpikeHistory& history) {
    const auto list = [](const double(&ring)[SpikeHistory::steps]) {
        return std::vector<double>(std::begin(ring), std::end(ring));
    };
    write_file(checkpoint / spikes_name, to_text(Json{{"steps", history.count},
                                                      {"spikes", history.spikes},
                                                      {"losses", list(history.losses)},
                                                      {"norms", list(history.norms)}}) +
                                             "\n");
    return spikes_name;
}

SpikeHistory read_spikes(const std::filesystem::path& checkpoint) {
    const std::filesystem::path path = checkpoint / spikes_name;
    SpikeHistory history;
    if (!std::filesystem::exists(path)) return history;
    const Json json = read_json(path);
    history.count = field<int64_t>(json, "steps", path);
    history.spikes = field<int64_t>(json, "spikes", path);
    for (const auto& [name, ring] :
         {std::pair{"losses", history.losses}, {"norms", history.norms}}) {
        const auto values = field<std::vector<double>>(json, name, path);
        if (values.size() != SpikeHistory::steps || history.count < 0)
            throw Error(path.string(), " does not have ", SpikeHistory::steps, " ", name,
                        "; restore the checkpoint from a copy or use another one");
        std::ranges::copy(values, ring);
    }
    return history;
}

}  // namespace train_gpt
