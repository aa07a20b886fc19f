/* In every build codes, norms and outputs in integers hash to the values of goldens.h and attend_goldens.h. */
#include "attend_golden.h"
#include "attend_goldens.h"
#include "goldens.h"
#include "runner.h"

static void compare(const golden *made, const golden *expected)
{
    CHECK(made->codes == expected->codes, "codes hash to %016llx, not %016llx", (unsigned long long)made->codes,
          (unsigned long long)expected->codes);
    CHECK(made->norms == expected->norms, "norms hash to %016llx, not %016llx", (unsigned long long)made->norms,
          (unsigned long long)expected->norms);
}

static void check_golden(const void *parameters)
{
    int index = *(const int *)parameters;
    golden_case c;
    golden made;
    char name[GOLDEN_NAME_SIZE];
    REQUIRE(golden_find(index, &c), "no case %d", index);
    golden_name(&c, name);
    REQUIRE(!strcmp(name, goldens[index].name), "goldens.h has %s at %d", goldens[index].name, index);
    REQUIRE(golden_make(&c, &made), "encode failed");
    compare(&made, &goldens[index]);
}

static void check_converted(const void *parameters)
{
    int index = *(const int *)parameters;
    golden_pair p;
    golden made;
    char name[GOLDEN_NAME_SIZE];
    REQUIRE(golden_pair_find(index, &p), "no pair %d", index);
    golden_pair_name(&p, name);
    REQUIRE(!strcmp(name, conversion_goldens[index].name), "goldens.h has %s at %d", conversion_goldens[index].name,
            index);
    REQUIRE(golden_pair_make(&p, &made), "conversion failed");
    compare(&made, &conversion_goldens[index]);
}

static void check_calibrated(const void *parameters)
{
    int index = *(const int *)parameters;
    golden_calibration c;
    golden made;
    char name[GOLDEN_NAME_SIZE];
    REQUIRE(golden_calibration_find(index, &c), "no case %d", index);
    golden_calibration_name(&c, name);
    REQUIRE(!strcmp(name, calibration_goldens[index].name), "goldens.h has %s at %d", calibration_goldens[index].name,
            index);
    REQUIRE(golden_calibration_make(&c, &made), "calibration failed");
    compare(&made, &calibration_goldens[index]); /* centre and scale in the place of codes and norms */
}

/* With the best products of integers that the processor has, and some with all others. */
static void check_attended(const void *parameters)
{
    int index = *(const int *)parameters;
    const uint64_t wanted = attend_goldens[index].out;
    attend_golden_case c;
    uint64_t hash, plain;
    char name[GOLDEN_NAME_SIZE];
    REQUIRE(attend_golden_find(index, &c), "no case %d", index);
    attend_golden_name(&c, name);
    REQUIRE(!strcmp(name, attend_goldens[index].name), "attend_goldens.h has %s at %d", attend_goldens[index].name,
            index);
    REQUIRE(attend_golden_make(&c, &hash), "attention failed");
    CHECK(hash == wanted, "the output hashes to %016llx, not %016llx", (unsigned long long)hash,
          (unsigned long long)wanted);
    if (index % 16) return;
    const char best = test_set_products(1);
    for (char products = 1; products < best; products++) {
        test_set_products(products);
        CHECK(attend_golden_make(&c, &plain) && plain == wanted, "with products %d the output hashes to %016llx",
              products, (unsigned long long)plain);
    }
    test_set_products(best);
}

static void check_complete(const void *parameters)
{
    (void)parameters;
    int n_goldens = (int)(sizeof goldens / sizeof *goldens);
    golden_case c;
    CHECK(golden_find(n_goldens - 1, &c) && !golden_find(n_goldens, &c), "%d goldens are not the cases of golden.h",
          n_goldens);
    int n_converted = (int)(sizeof conversion_goldens / sizeof *conversion_goldens);
    golden_pair converted;
    CHECK(golden_pair_find(n_converted - 1, &converted) && !golden_pair_find(n_converted, &converted),
          "%d goldens are not the pairs of golden.h", n_converted);
    int n_calibrated = (int)(sizeof calibration_goldens / sizeof *calibration_goldens);
    golden_calibration calibrated;
    CHECK(golden_calibration_find(n_calibrated - 1, &calibrated) && !golden_calibration_find(n_calibrated, &calibrated),
          "%d goldens are not the calibrations of golden.h", n_calibrated);
    int n_attended = (int)(sizeof attend_goldens / sizeof *attend_goldens);
    attend_golden_case attended;
    CHECK(attend_golden_find(n_attended - 1, &attended) && !attend_golden_find(n_attended, &attended),
          "%d goldens are not the cases of attend_golden.h", n_attended);
}

void test_golden_cases(void)
{
    int n_goldens = (int)(sizeof goldens / sizeof *goldens);
    for (int i = 0; i < n_goldens; i++) test_add(check_golden, &i, sizeof i, "golden/%s", goldens[i].name);
    int n_converted = (int)(sizeof conversion_goldens / sizeof *conversion_goldens);
    for (int i = 0; i < n_converted; i++)
        test_add(check_converted, &i, sizeof i, "golden/%s", conversion_goldens[i].name);
    int n_calibrated = (int)(sizeof calibration_goldens / sizeof *calibration_goldens);
    for (int i = 0; i < n_calibrated; i++)
        test_add(check_calibrated, &i, sizeof i, "golden/%s", calibration_goldens[i].name);
    int n_attended = (int)(sizeof attend_goldens / sizeof *attend_goldens);
    for (int i = 0; i < n_attended; i++) test_add(check_attended, &i, sizeof i, "golden/%s", attend_goldens[i].name);
    test_add(check_complete, NULL, 0, "golden/complete");
}
