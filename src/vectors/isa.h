/* >>isa-code: which instruction set is in use */

/* Best first; the choice is among those that the processor has. */
static const tqkv__isa *const tqkv__isas[] = {
#ifdef TQKV__AVX512
    &tqkv__isa_avx512,
#endif
#ifdef TQKV__AVX2
    &tqkv__isa_avx2,
#endif
#ifdef TQKV__NEON
    &tqkv__isa_neon,
#endif
    &tqkv__isa_scalar};
#define TQKV__ISAS (sizeof tqkv__isas / sizeof tqkv__isas[0])

static bool tqkv__isa_present(const tqkv__isa *isa)
{
#ifdef TQKV__AVX2
    unsigned eax, ebx, ecx = 0, edx;
    __builtin_cpu_init();
#ifdef TQKV__AVX512
    if (isa == &tqkv__isa_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") && tqkv__isa_present(&tqkv__isa_avx2);
#endif
    if (isa == &tqkv__isa_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && /* clang 14 does not know f16c */
               __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
#endif
    return isa != NULL;
}

/* The library's only variable beside tqkv__products: set once, or by tqkv_isa_force */
static const tqkv__isa *tqkv__isa_chosen;

static const tqkv__isa *tqkv__isa_named(const char *name)
{
    for (size_t i = 0; i < TQKV__ISAS; i++)
        if (strcmp(name, tqkv__isas[i]->name) == 0) return tqkv__isas[i];
    return NULL;
}

static const tqkv__isa *tqkv__isa_now(void)
{
    const tqkv__isa *isa = __atomic_load_n(&tqkv__isa_chosen, __ATOMIC_ACQUIRE);
    if (isa) return isa;
    const char *wanted = getenv("TQKV_ISA");
    isa = wanted ? tqkv__isa_named(wanted) : NULL;
    for (size_t i = 0; i < TQKV__ISAS && (!isa || !tqkv__isa_present(isa)); i++) isa = tqkv__isas[i];
    const tqkv__isa *now = NULL; /* or what another thread has chosen in the meantime */
    const bool first =
        __atomic_compare_exchange_n(&tqkv__isa_chosen, &now, isa, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return first ? isa : now;
}

/* Returns the chosen set, or the next narrower one that has three vectors in a row of head_dim. A processor that has a
   set has the narrower ones; asking it again would take microseconds in a virtual machine. */
static const tqkv__isa *tqkv__isa_for(int head_dim)
{
    const tqkv__isa *isa = tqkv__isa_now();
    for (size_t i = 0; i < TQKV__ISAS; i++)
        if (isa->lanes * 3 > head_dim && tqkv__isas[i]->lanes < isa->lanes) isa = tqkv__isas[i];
    return isa;
}

static const tqkv__isa *tqkv__narrower(const tqkv__isa *a, const tqkv__isa *b) { return a->lanes < b->lanes ? a : b; }

static const tqkv__codec *tqkv__codec_for(int head_dim) { return tqkv__isa_for(head_dim)->codec; }

#ifdef TQKV_NO_INTEGER
/* Plain C for all sets: only the time differs. */
static const tqkv__integers *tqkv__integers_for(const tqkv__isa *isa)
{
    (void)isa;
    return &tqkv__integers_scalar;
}
#else
static char tqkv__products; /* set once. 1: what every processor of a set has, 2: AVX-VNNI or DotProd, 3: I8MM */

#if defined(TQKV__NEON) && defined(__APPLE__)
static bool tqkv__processor_has(const char *name)
{
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, NULL, 0) == 0 && value != 0;
}
#endif

static int tqkv__find_products(void)
{
    bool best = false, matrices = false;
#if defined(TQKV__AVX2)
    unsigned eax, ebx, ecx, edx;
    best = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;
#elif defined(TQKV__NEON) && defined(__APPLE__)
    best = tqkv__processor_has("hw.optional.arm.FEAT_DotProd");
    matrices = tqkv__processor_has("hw.optional.arm.FEAT_I8MM");
#elif defined(TQKV__NEON) && defined(__linux__)
    best = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#ifdef HWCAP2_I8MM
    matrices = (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
#endif
#ifdef __ARM_FEATURE_DOTPROD
    best = true;
#endif
#ifdef __ARM_FEATURE_MATMUL_INT8
    matrices = true;
#endif
    return best ? matrices ? 3 : 2 : 1;
}

/* The processor is asked once: it takes microseconds in a virtual machine. */
static char tqkv__products_now(void)
{
    char known = __atomic_load_n(&tqkv__products, __ATOMIC_RELAXED);
    if (!known) known = (char)tqkv__find_products();
    __atomic_store_n(&tqkv__products, known, __ATOMIC_RELAXED);
    return known;
}

/* Integers beside the floats of a set, by the best products that the processor has. */
static const tqkv__integers *tqkv__integers_for(const tqkv__isa *isa)
{
    const char products = tqkv__products_now();
#ifdef TQKV__AVX512
    if (isa == &tqkv__isa_avx512 && __builtin_cpu_supports("avx512vnni")) return &tqkv__i_integers_avx512;
#endif
#ifdef TQKV__AVX2
    if (isa != &tqkv__isa_scalar) return &tqkv__i_integers_avx2;
#endif
#ifdef TQKV__NEON
#ifdef TQKV__I8MM
    if (isa != &tqkv__isa_scalar && products > 2) return &tqkv__i_integers_i8mm;
#endif
    if (isa != &tqkv__isa_scalar) return products > 1 ? &tqkv__i_integers_dotprod : &tqkv__i_integers_neon;
#endif
    (void)isa, (void)products;
    return &tqkv__integers_scalar;
}
#endif

TQKV_API const char *tqkv_isa_name(void) { return tqkv__isa_now()->name; }

TQKV_API tqkv_result tqkv_isa_force(const char *name)
{
    const tqkv__isa *isa = name ? tqkv__isa_named(name) : NULL;
    if (name && !isa) return TQKV__INVALID("name: no instruction set");
    if (name && !tqkv__isa_present(isa)) return TQKV__REFUSE(UNSUPPORTED, "the processor lacks this instruction set");
    __atomic_store_n(&tqkv__isa_chosen, isa, __ATOMIC_RELEASE);
    return TQKV_OK;
}
