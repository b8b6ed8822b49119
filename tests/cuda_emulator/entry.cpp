// One kernel as a shared library: PLSH_FILE holds it, PLSH_KERNEL names it.
#include PLSH_FILE

extern "C" __attribute__((visibility("default"))) int emulate(
    const void* params, const emulator::Launch* how, const emulator::Range* ranges, int count,
    char* report, int report_size) {
    return emulator::launch(
        [](const void* p) { PLSH_KERNEL(*static_cast<const Params*>(p)); }, params, *how, ranges,
        count, report, report_size);
}
