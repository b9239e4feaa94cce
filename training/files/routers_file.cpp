#include "training/files/routers_file.h"

#include <algorithm>

#include "base/error.h"
#include "base/file.h"
#include "base/json_file.h"
#include "base/json_text.h"

namespace train_gpt {

namespace {

constexpr const char* routers_name = "routers.json";

}  // namespace

std::string write_routers(const std::filesystem::path& checkpoint, int n_expert,
                          const std::vector<int32_t>& chosen) {
    Json rows = Json::array();
    for (auto first = chosen.begin(); first != chosen.end(); first += n_expert)
        rows.push_back(std::vector<int32_t>(first, first + n_expert));
    write_file(checkpoint / routers_name, to_text(Json{{"chosen", rows}}) + "\n");
    return routers_name;
}

std::vector<int32_t> read_routers(const std::filesystem::path& checkpoint, size_t n) {
    const std::filesystem::path path = checkpoint / routers_name;
    if (!std::filesystem::exists(path)) return std::vector<int32_t>(n);
    std::vector<int32_t> chosen;
    for (const auto& row :
         field<std::vector<std::vector<int32_t>>>(read_json(path), "chosen", path))
        chosen.insert(chosen.end(), row.begin(), row.end());
    if (chosen.size() != n || std::ranges::any_of(chosen, [](int32_t count) { return count < 0; }))
        throw Error(path.string(), " does not have ", n,
                    " counts of at least 0; restore the checkpoint from a copy or use another one");
    return chosen;
}

}  // namespace train_gpt
