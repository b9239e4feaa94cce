#include "model/scratch.h"

#include <algorithm>

#include "kernels/embedding.h"
#include "kernels/head_loss.h"
#include "model/block.h"

namespace train_gpt {

size_t scratch_bytes_of(const Stream& stream, const ModelPass& pass) {
    size_t most = 0;
    for (int l = pass.first; l < pass.last; ++l) {
        const LayerSpec layer = pass.spec.layer(l);
        most = std::max({most,
                         block_scratch_bytes(stream, layer, pass.dtype, pass.rows, pass.sequences),
                         pass.attention(layer)});
    }
    if (pass.has_embedding)
        most = std::max(most, embedding_scratch_bytes(stream, pass.rows, pass.vocab_rows));
    if (pass.logits_rows > 0)
        most = std::max(most, head_loss_scratch_bytes(stream, pass.dtype, pass.logits_rows,
                                                      pass.vocab_rows, pass.spec.n_embd));
    return most;
}

}  // namespace train_gpt
