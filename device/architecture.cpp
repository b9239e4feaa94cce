#include "device/architecture.h"

namespace train_gpt {

int architecture(const Device& device) {
    if (device.planned_architecture > 0) return device.planned_architecture;
    TRAIN_GPT_ON_CUDA(device, architecture(device));
    return 0;
}

}  // namespace train_gpt
