/* What code under ARC calls, over gcc's runtime, which has no ARC: so tqkv_metal.m runs on Linux as it is compiled in a
   program with -fobjc-arc. clang has ARC for GNUstep's runtime alone; what its objects ask of that one is here, too. */
#import <Foundation/Foundation.h>
#include <dlfcn.h>
#include <objc/message.h>

id objc_retain(id object);
void objc_release(id object);
id objc_retainAutoreleasedReturnValue(id object);
id objc_autoreleaseReturnValue(id object);
void objc_storeStrong(id *at, id object);

id objc_retain(id object) { return [object retain]; }
void objc_release(id object) { [object release]; }
id objc_retainAutoreleasedReturnValue(id object) { return [object retain]; }
id objc_autoreleaseReturnValue(id object) { return [object autorelease]; }

void objc_storeStrong(id *at, id object)
{
    id before = *at;
    *at = [object retain];
    [before release];
}

/* A method, in the form in which GNUstep's runtime finds it. */
typedef struct objc_slot {
    Class owner, cached_for;
    const char *types;
    int version;
    IMP method;
} objc_slot;

objc_slot *objc_msg_lookup_sender(id *receiver, SEL selector, id sender);
objc_slot *objc_msg_lookup_sender(id *receiver, SEL selector, id sender)
{
    static __thread objc_slot slot;
    (void)sender;
    slot.method = objc_msg_lookup(*receiver, selector);
    return &slot;
}

/* An object file's module: for a file without classes GNUstep's form is that of gcc, but for version and size. */
typedef struct objc_module {
    unsigned long version, size;
    const char *name;
    void *symbols;
} objc_module;

void __objc_exec_class(objc_module *module);
void __objc_exec_class(objc_module *module)
{
    void (*load)(objc_module *) = (void (*)(objc_module *))dlsym(RTLD_NEXT, "__objc_exec_class");
    module->version = 8;
    module->size = sizeof *module;
    load(module);
}
