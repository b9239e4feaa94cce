#include "parallel/group_ctas.h"

#include <algorithm>

#include "base/error.h"

namespace train_gpt {

GroupCtas group_ctas(int world, const MeshSizes& sizes, int multiprocessors, int wanted) {
    if (wanted > 0) return {wanted, wanted, wanted};
    if (!sizes.has_several_groups() || multiprocessors == 0) return {};
    constexpr int usual = 24;
    const int limit = multiprocessors - std::max(1, multiprocessors / 8);
    const bool is_small = limit < 16;
    GroupCtas ctas{.everyone = is_small ? 1 : 2, .exchange = usual, .messages = is_small ? 1 : 4};
    const bool has_layers = sizes.tensor > 1 || sizes.context > 1;
    const int left = limit - ctas.everyone - (sizes.pipeline > 1 ? ctas.messages : 0);
    ctas.exchange = std::clamp(left / (has_layers ? 2 : 1), 1, usual);
    // All ranks may be the only group of their kind.
    if (world == sizes.pipeline)
        ctas.everyone = ctas.messages;
    else if (world == sizes.tensor || (sizes.tensor == 1 && sizes.pipeline == 1))
        ctas.everyone = ctas.exchange;
    return ctas;
}

std::string describe(const GroupCtas& ctas, int multiprocessors) {
    if (ctas.exchange == 0) return "";
    return concat("of ", multiprocessors, " multiprocessors, collectives hold at most ",
                  ctas.exchange, " along data, tensor or context, ", ctas.messages,
                  " along pipeline, ", ctas.everyone,
                  " over all ranks: several run at the same time, and kernels need some, too");
}

}  // namespace train_gpt
