/* A valgrind tool that counts the cache lines which virtual CPUs share.
 *
 * The client (crates/conflicts/src/client.rs) says which virtual CPU a thread stands for, and when an operation begins and
 * ends. Inside of operations the tool sees every access to memory, keeps for each line of 64 bytes which CPUs hold it, as
 * the MESI protocol has it with caches that never evict, and counts coherence transfers: a write while another CPU holds
 * the line, a read of what another CPU modified. A write is a write, also of the value that was there, and of an addition
 * of 0. The result goes to a file, as lines of fields with tabs between them (`write_report`).
 *
 * So that two runs are the same, it answers for the machine: number of CPUs, the CPU of a thread, the wall clock,
 * random bytes.
 *
 * Threads run one at a time, as valgrind does it anyway; the client lets its workers take turns. Not seen: time, waiting,
 * what the kernel itself shares, instructions RDPID and RDTSCP.
 *
 * Licence: valgrind's libraries are GPL-2.0-or-later, so this file is, too, unlike the rest of braidfs. It is a test tool
 * that `make conflicts` builds on the machine where it runs; no package and no binary of braidfs contains it.
 * SPDX-License-Identifier: GPL-2.0-or-later
 */
#include "pub_tool_basics.h"
#include "pub_tool_aspacemgr.h"
#include "pub_tool_clreq.h"
#include "pub_tool_debuginfo.h"
#include "pub_tool_hashtable.h"
#include "pub_tool_libcassert.h"
#include "pub_tool_libcbase.h"
#include "pub_tool_libcfile.h"
#include "pub_tool_libcprint.h"
#include "pub_tool_machine.h"
#include "pub_tool_mallocfree.h"
#include "pub_tool_oset.h"
#include "pub_tool_stacktrace.h"
#include "pub_tool_threadstate.h"
#include "pub_tool_tooliface.h"
#include "pub_tool_vkiscnums.h"
#include "libvex_guest_amd64.h"

/* Requests; the same numbers stand in client.rs. */
enum {
    REQ_PRESENT = VG_USERREQ_TOOL_BASE('B', 'F'), /* -> 1 */
    REQ_MACHINE, /* CPUs: what the process sees from now on; forgets all lines */
    REQ_BEGIN, /* CPU, kind (enum count): this thread runs an operation */
    REQ_END, /* it has ended */
    REQ_CLEAR, /* forgets counts, keeps who holds which line */
    REQ_REPORT, /* path */
    REQ_ALLOCATED, /* address, bytes */
    REQ_FREED, /* address */
    REQ_LOCKED, /* address: this thread has that lock for itself */
    REQ_UNLOCKED /* address: it has let it go */
};

/* Of the kernel: a request of prctl(2), types of entries of the auxiliary vector. */
enum { PR_GET_AUXV = 0x41555856, AT_NULL = 0, AT_IGNORE = 1, AT_SYSINFO_EHDR = 33 };

/* Whom an operation is counted for; the same numbers stand in client.rs. */
enum count { COUNT_NOT, COUNT_FOREGROUND, COUNT_BACKGROUND, KINDS };

enum { CPUS_MAX = 64, THREADS_MAX = 1024, DEPTH = 16, ALLOC_DEPTH = 12, CALLS = 512, LINE_BITS = 6, LINE = 1 << LINE_BITS };

/* Lines of a report with their stacks: such as operations waited for, such as only commits did; the rest is summed up. */
enum { LINES_TOLD = 64, BACKGROUND_TOLD = 8, SITES_TOLD = 6 };

/* Locks that a thread holds at once at most, and locks of a report with their stacks. */
enum { HELD_MAX = 64, LOCKS_TOLD = 32 };

/* Kinds of access. */
enum { READ = 1, WRITE = 2, LOCKED = 4, KERNEL = 8 };

/* An instruction whose access made a transfer. */
typedef struct Site {
    struct Site* next;
    Addr ip;
    UInt access, frames;
    ULong cpus, bytes, transfers;
    Addr stack[DEPTH];
} Site;

/* Which bytes of a line a CPU touched since REQ_CLEAR. */
typedef struct Use {
    struct Use* next;
    UInt cpu;
    ULong read, written;
} Use;

typedef struct Line {
    struct Line* next; /* of the hash table */
    UWord key; /* address / 64 */
    ULong holders; /* CPUs with a copy */
    ULong had; /* CPUs that ever had one */
    Bool modified; /* the one holder has written it since it got it */
    ULong transfers[KINDS];
    Use* uses;
    Site* sites;
} Line;

/* A lock, in what operations of the foreground did since REQ_CLEAR. */
typedef struct Lock {
    struct Lock* next; /* of the hash table */
    UWord key; /* address */
    UWord block; /* number of the heap block that it is in: another lock may come to lie here */
    ULong cpus; /* who took it */
    UInt last; /* the one that took it last, + 1 */
    ULong holds, handoffs; /* how often it was taken, and by another CPU than the time before */
    ULong instructions, transfers; /* while it was held */
    UInt frames;
    Addr stack[DEPTH]; /* of one that took it */
} Lock;

/* A lock that a thread holds. */
typedef struct {
    Addr lock;
    ULong instructions, transfers; /* those of the thread when it got it */
} Hold;

/* A heap block, by what the client's allocator says. */
typedef struct {
    Addr start;
    SizeT size;
    UWord number;
    UInt thread, frames;
    Addr stack[ALLOC_DEPTH];
} Block;

typedef struct {
    Bool inside;
    UInt cpu;
    enum count count;
    ULong began; /* instructions when the operation began */
    ULong transfers; /* of this thread, ever */
    UInt held; /* locks, while it is in an operation */
    Hold holds[HELD_MAX];
} Thread;

typedef struct {
    ULong ops, accesses, locked, clocks, instructions;
    UInt calls[CALLS];
} Sum;

static VgHashTable* lines;
static VgHashTable* locks;
static OSet* blocks;
static Thread threads[THREADS_MAX];
static Sum sums[KINDS];
static ULong instructions; /* of the process: one thread runs at a time, and what it does in a section is the difference */
static UWord last_block; /* number of the heap block that was made last */
static UWord inside; /* threads in an operation: instrumented code looks at it before it calls */
static UInt cpus;
static ULong clock_ns;
static Line* recent[64]; /* lines found lately */

/* The clock that the client sees: it starts at this second, every look takes so long, as one without a system call does, and
 * the coarse clocks tick so seldom, as Linux' do with 250 ticks a second. */
static const ULong CLOCK_START_S = 1767225600ULL, CLOCK_STEP_NS = 20, CLOCK_TICK_NS = 4000000;

/* ---- lines ---- */

static Line* line_at(UWord key) {
    Line** slot = &recent[key % (sizeof recent / sizeof *recent)];
    if (LIKELY(*slot && (*slot)->key == key)) return *slot;
    Line* l = VG_(HT_lookup)(lines, key);
    if (!l) {
        l = VG_(calloc)("conflicts.line", 1, sizeof *l);
        l->key = key;
        VG_(HT_add_node)(lines, l);
    }
    return *slot = l;
}

static void note_use(Line* l, UInt cpu, ULong bytes, UInt access) {
    Use* u = l->uses;
    while (u && u->cpu != cpu) u = u->next;
    if (!u) {
        u = VG_(calloc)("conflicts.use", 1, sizeof *u);
        u->cpu = cpu;
        u->next = l->uses;
        l->uses = u;
    }
    if (access & WRITE) u->written |= bytes;
    if (access & READ) u->read |= bytes;
}

static void note_site(Line* l, ThreadId tid, UInt cpu, ULong bytes, UInt access, Addr ip) {
    Site* s = l->sites;
    while (s && (s->ip != ip || s->access != access)) s = s->next;
    if (!s) {
        s = VG_(calloc)("conflicts.site", 1, sizeof *s);
        s->ip = ip;
        s->access = access;
        s->frames = VG_(get_StackTrace)(tid, s->stack, DEPTH, NULL, NULL, 0);
        s->stack[0] = ip; /* the guest's own counter is that of the block */
        s->next = l->sites;
        l->sites = s;
    }
    s->cpus |= 1ULL << cpu;
    s->bytes |= bytes;
    s->transfers++;
}

/* One access within one line. */
static void touch(ThreadId tid, Thread* t, Addr a, UInt size, UInt access, Addr ip) {
    Line* l = line_at(a >> LINE_BITS);
    ULong me = 1ULL << t->cpu;
    ULong bytes = (size >= LINE ? ~0ULL : (1ULL << size) - 1) << (a & (LINE - 1));
    Bool holds = (l->holders & me) != 0, transfer;
    if (access & WRITE) {
        transfer = (l->holders & ~me) != 0;
        l->holders = me;
        l->modified = True;
    } else {
        /* the first read of what nobody changed is a miss that does not come back */
        transfer = !holds && (l->modified || (l->had & me));
        if (!holds) l->modified = False;
        l->holders |= me;
    }
    l->had |= me;
    if (t->count == COUNT_NOT) return;
    sums[t->count].accesses++;
    if (access & LOCKED) sums[t->count].locked++;
    note_use(l, t->cpu, bytes, access);
    if (transfer) {
        l->transfers[t->count]++;
        t->transfers++;
        note_site(l, tid, t->cpu, bytes, access, ip);
    }
}

static void touch_range(ThreadId tid, Addr a, SizeT size, UInt access, Addr ip) {
    Thread* t = &threads[tid];
    if (!t->inside) return;
    while (size) {
        SizeT n = LINE - (a & (LINE - 1));
        if (n > size) n = size;
        touch(tid, t, a, n, access, ip);
        a += n;
        size -= n;
    }
}

/* ---- instrumentation ---- */

static VG_REGPARM(3) void on_access(Addr a, UWord size_and_access, Addr ip) {
    touch_range(VG_(get_running_tid)(), a, size_and_access >> 8, size_and_access & 0xff, ip);
}

/* Calls `on_access` where a thread is inside of an operation, and `guard` holds. */
static void add_call(IRSB* out, IRExpr* addr, Int size, UInt access, Addr ip, IRExpr* guard) {
    IRDirty* d = unsafeIRDirty_0_N(3, "on_access", VG_(fnptr_to_fnentry)(&on_access),
        mkIRExprVec_3(addr, mkIRExpr_HWord((UWord)size << 8 | access), mkIRExpr_HWord(ip)));
    IRTemp word = newIRTemp(out->tyenv, Ity_I64), any = newIRTemp(out->tyenv, Ity_I1);
    addStmtToIRSB(out, IRStmt_WrTmp(word, IRExpr_Load(Iend_LE, Ity_I64, mkIRExpr_HWord((UWord)&inside))));
    addStmtToIRSB(out, IRStmt_WrTmp(any, IRExpr_Unop(Iop_CmpNEZ64, IRExpr_RdTmp(word))));
    if (guard) {
        IRTemp a = newIRTemp(out->tyenv, Ity_I64), b = newIRTemp(out->tyenv, Ity_I64), c = newIRTemp(out->tyenv, Ity_I64);
        IRTemp both = newIRTemp(out->tyenv, Ity_I1);
        addStmtToIRSB(out, IRStmt_WrTmp(a, IRExpr_Unop(Iop_1Uto64, IRExpr_RdTmp(any))));
        addStmtToIRSB(out, IRStmt_WrTmp(b, IRExpr_Unop(Iop_1Uto64, guard)));
        addStmtToIRSB(out, IRStmt_WrTmp(c, IRExpr_Binop(Iop_And64, IRExpr_RdTmp(a), IRExpr_RdTmp(b))));
        addStmtToIRSB(out, IRStmt_WrTmp(both, IRExpr_Unop(Iop_CmpNEZ64, IRExpr_RdTmp(c))));
        any = both;
    }
    d->guard = IRExpr_RdTmp(any);
    /* a stack trace may be taken in it */
    d->nFxState = 3;
    VG_(memset)(&d->fxState, 0, sizeof d->fxState);
    Int offsets[] = { offsetof(VexGuestAMD64State, guest_RSP), offsetof(VexGuestAMD64State, guest_RBP),
        offsetof(VexGuestAMD64State, guest_RIP) };
    for (Int i = 0; i < 3; i++) {
        d->fxState[i].fx = Ifx_Read;
        d->fxState[i].offset = offsets[i];
        d->fxState[i].size = 8;
    }
    addStmtToIRSB(out, IRStmt_Dirty(d));
}

static Int bytes_of(const IRSB* sb, IRExpr* e) { return sizeofIRType(typeOfIRExpr(sb->tyenv, e)); }

/* Does this instruction compare and swap? Then its load is no access of its own. */
static Bool swaps(const IRSB* in, Int from) {
    for (Int i = from; i < in->stmts_used && in->stmts[i]->tag != Ist_IMark; i++)
        if (in->stmts[i]->tag == Ist_CAS) return True;
    return False;
}

/* Counts so many instructions. */
static void add_count(IRSB* out, UInt* n) {
    if (!*n) return;
    IRTemp had = newIRTemp(out->tyenv, Ity_I64), has = newIRTemp(out->tyenv, Ity_I64);
    IRExpr* at = mkIRExpr_HWord((UWord)&instructions);
    addStmtToIRSB(out, IRStmt_WrTmp(had, IRExpr_Load(Iend_LE, Ity_I64, at)));
    addStmtToIRSB(out, IRStmt_WrTmp(has, IRExpr_Binop(Iop_Add64, IRExpr_RdTmp(had), IRExpr_Const(IRConst_U64(*n)))));
    addStmtToIRSB(out, IRStmt_Store(Iend_LE, at, IRExpr_RdTmp(has)));
    *n = 0;
}

static IRSB* instrument(VgCallbackClosure* closure, IRSB* in, const VexGuestLayout* layout, const VexGuestExtents* extents,
    const VexArchInfo* host, IRType word, IRType host_word) {
    IRSB* out = deepCopyIRSBExceptStmts(in);
    Addr ip = 0;
    UInt count = 0; /* instructions that are not added yet */
    Bool swap = False;
    for (Int i = 0; i < in->stmts_used; i++) {
        IRStmt* s = in->stmts[i];
        switch (s->tag) {
        case Ist_NoOp: continue;
        case Ist_IMark:
            ip = s->Ist.IMark.addr + s->Ist.IMark.delta;
            swap = swaps(in, i + 1);
            count++;
            break;
        case Ist_Exit: add_count(out, &count); break;
        case Ist_WrTmp: {
            IRExpr* e = s->Ist.WrTmp.data;
            if (e->tag == Iex_Load && !swap) add_call(out, e->Iex.Load.addr, sizeofIRType(e->Iex.Load.ty), READ, ip, NULL);
            break;
        }
        case Ist_Store: add_call(out, s->Ist.Store.addr, bytes_of(in, s->Ist.Store.data), WRITE, ip, NULL); break;
        case Ist_StoreG: {
            IRStoreG* g = s->Ist.StoreG.details;
            add_call(out, g->addr, bytes_of(in, g->data), WRITE, ip, g->guard);
            break;
        }
        case Ist_LoadG: {
            IRLoadG* g = s->Ist.LoadG.details;
            IRType widened, loaded;
            typeOfIRLoadGOp(g->cvt, &widened, &loaded);
            add_call(out, g->addr, sizeofIRType(loaded), READ, ip, g->guard);
            break;
        }
        case Ist_CAS: {
            IRCAS* c = s->Ist.CAS.details;
            Int size = bytes_of(in, c->dataLo) * (c->dataHi ? 2 : 1);
            add_call(out, c->addr, size, READ | WRITE | LOCKED, ip, NULL);
            break;
        }
        case Ist_Dirty: {
            IRDirty* d = s->Ist.Dirty.details;
            UInt access = d->mFx == Ifx_Read ? READ : d->mFx == Ifx_Write ? WRITE : READ | WRITE;
            if (d->mFx != Ifx_None) add_call(out, d->mAddr, d->mSize, access, ip, d->guard);
            break;
        }
        default: break;
        }
        addStmtToIRSB(out, s);
    }
    add_count(out, &count);
    return out;
}

/* ---- system calls ---- */

/* Those that the kernel answers in user space when no valgrind runs. */
static Bool is_clock(UInt call) {
    return call == __NR_clock_gettime || call == __NR_gettimeofday || call == __NR_time || call == __NR_getcpu;
}

static void on_kernel_read(CorePart part, ThreadId tid, const HChar* what, Addr a, SizeT size) {
    if (inside && part == Vg_CoreSysCall) touch_range(tid, a, size, READ | KERNEL, VG_(get_IP)(tid));
}

static void on_kernel_write(CorePart part, ThreadId tid, Addr a, SizeT size) {
    if (inside && part == Vg_CoreSysCall) touch_range(tid, a, size, WRITE | KERNEL, VG_(get_IP)(tid));
}

static void before_call(ThreadId tid, UInt call, UWord* args, UInt nargs) {
    const Thread* t = &threads[tid];
    if (!t->inside || t->count == COUNT_NOT) return;
    if (is_clock(call)) sums[t->count].clocks++;
    else sums[t->count].calls[call < CALLS ? call : 0]++;
}

/* The machine that the process sees does not depend on the one below it. */
static void after_call(ThreadId tid, UInt call, UWord* args, UInt nargs, SysRes res) {
    if (sr_isError(res)) return;
    if (call == __NR_getrandom) {
        UChar* at = (UChar*)args[0];
        for (UWord i = 0; i < sr_Res(res); i++) at[i] = (UChar)(i * 101 + 7);
    } else if (call == __NR_clock_gettime && args[1] && args[0] != 2 && args[0] != 3) { /* not CPU time */
        /* Monotonic clocks, too: the allocator looks at one to see whether it is time to give memory back. Who waits until a
         * moment of this clock waits for ever, as the kernel's is far behind. */
        struct vki_timespec* at = (struct vki_timespec*)args[1];
        clock_ns += CLOCK_STEP_NS;
        const Bool coarse = args[0] == 5 || args[0] == 6; /* CLOCK_REALTIME_COARSE, CLOCK_MONOTONIC_COARSE */
        const ULong ns = coarse ? clock_ns - clock_ns % CLOCK_TICK_NS : clock_ns;
        at->tv_sec = CLOCK_START_S + ns / 1000000000ULL;
        at->tv_nsec = ns % 1000000000ULL;
    } else if (call == __NR_prctl && args[0] == PR_GET_AUXV) {
        /* valgrind hides the vDSO, but knows of auxv(5) only, not of this other way to it */
        for (UWord* entry = (UWord*)args[1]; (UChar*)(entry + 2) <= (UChar*)args[1] + args[2] && entry[0] != AT_NULL; entry += 2)
            if (entry[0] == AT_SYSINFO_EHDR) entry[0] = AT_IGNORE;
    } else if (cpus && call == __NR_getcpu && args[0]) {
        *(UInt*)args[0] = threads[tid].inside ? threads[tid].cpu : tid % cpus;
    } else if (cpus && call == __NR_sched_getaffinity) {
        UChar* mask = (UChar*)args[2];
        for (UWord i = 0; i < sr_Res(res) && i < args[1]; i++) mask[i] = 0;
        for (UInt c = 0; c < cpus && c / 8 < args[1]; c++) mask[c / 8] |= 1 << c % 8;
    }
}

/* ---- heap blocks ---- */

static Word compare_block(const void* key, const void* elem) {
    Addr a = *(const Addr*)key;
    const Block* b = elem;
    return a < b->start ? -1 : a >= b->start + b->size ? 1 : 0;
}

static void forget_block(Addr a) {
    Block* b = VG_(OSetGen_LookupWithCmp)(blocks, &a, compare_block);
    if (!b) return;
    Addr start = b->start;
    VG_(OSetGen_FreeNode)(blocks, VG_(OSetGen_Remove)(blocks, &start));
}

static void add_block(ThreadId tid, Addr a, SizeT size) {
    if (!a || !size) return;
    forget_block(a);
    Block* b = VG_(OSetGen_AllocNode)(blocks, sizeof *b);
    b->start = a;
    b->size = size;
    b->number = ++last_block;
    b->thread = tid;
    b->frames = VG_(get_StackTrace)(tid, b->stack, ALLOC_DEPTH, NULL, NULL, 0);
    VG_(OSetGen_Insert)(blocks, b);
}

/* ---- locks ---- */

static Lock* lock_at(Addr a) {
    Block* b = VG_(OSetGen_LookupWithCmp)(blocks, &a, compare_block);
    UWord block = b ? b->number : 0;
    Lock* l = VG_(HT_lookup)(locks, a); /* the one that was added last */
    if (l && l->block == block) return l;
    /* one that is gone stays, with what it did */
    l = VG_(calloc)("conflicts.lock", 1, sizeof *l);
    l->key = a;
    l->block = block;
    VG_(HT_add_node)(locks, l);
    return l;
}

static void on_locked(ThreadId tid, Addr a) {
    Thread* t = &threads[tid];
    if (!t->inside || t->count != COUNT_FOREGROUND) return;
    tl_assert(t->held < HELD_MAX);
    Lock* l = lock_at(a);
    l->cpus |= 1ULL << t->cpu;
    l->holds++;
    if (l->last && l->last != t->cpu + 1) l->handoffs++;
    l->last = t->cpu + 1;
    if (!l->frames) l->frames = VG_(get_StackTrace)(tid, l->stack, DEPTH, NULL, NULL, 0);
    t->holds[t->held++] = (Hold) { a, instructions, t->transfers };
}

static void on_unlocked(ThreadId tid, Addr a) {
    Thread* t = &threads[tid];
    UInt i = t->held;
    while (i && t->holds[i - 1].lock != a) i--;
    if (!i) return; /* taken before the operation */
    Hold h = t->holds[i - 1];
    t->held--;
    for (; i <= t->held; i++) t->holds[i - 1] = t->holds[i];
    Lock* l = lock_at(a);
    l->instructions += instructions - h.instructions;
    l->transfers += t->transfers - h.transfers;
}

/* ---- the report ---- */

static Int report_fd;
static HChar report_buf[8192];
static UInt report_used;

static void put(const HChar* text, SizeT n) {
    if (report_used + n > sizeof report_buf) {
        VG_(write)(report_fd, report_buf, report_used);
        report_used = 0;
    }
    if (n > sizeof report_buf) n = sizeof report_buf;
    VG_(memcpy)(report_buf + report_used, text, n);
    report_used += n;
}

static void PRINTF_CHECK(1, 2) say(const HChar* format, ...) {
    HChar text[512];
    va_list args;
    va_start(args, format);
    UInt n = VG_(vsnprintf)(text, sizeof text, format, args);
    va_end(args);
    put(text, n < sizeof text ? n : sizeof text - 1);
}

/* "\tframe\tFUNCTION (FILE:LINE)", innermost first, inlined ones too. */
static void put_frames(const Addr* stack, UInt frames) {
    DiEpoch epoch = VG_(current_DiEpoch)();
    for (UInt i = 0; i < frames; i++) {
        /* a return address may belong to the next line of source */
        Addr ip = i ? stack[i] - 1 : stack[i];
        InlIPCursor* c = VG_(new_IIPC)(epoch, ip);
        do {
            const HChar* text = VG_(describe_IP)(epoch, ip, c);
            const HChar* colon = VG_(strstr)(text, ": ");
            if (colon) text = colon + 2;
            put("frame\t", 6);
            put(text, VG_(strlen)(text));
            put("\n", 1);
        } while (VG_(next_IIPC)(c));
        VG_(delete_IIPC)(c);
    }
}

static void put_place(Addr a) {
    const HChar* name;
    PtrdiffT offset;
    Block* b = VG_(OSetGen_LookupWithCmp)(blocks, &a, compare_block);
    if (b) {
        say("heap\t%lu\t%lu\t%u\n", b->size, a - b->start, b->thread);
        put_frames(b->stack, b->frames);
        return;
    }
    if (VG_(get_datasym_and_offset)(VG_(current_DiEpoch)(), a, &name, &offset)) {
        say("static\t%.300s\t%ld\n", name, offset);
        return;
    }
    ThreadId t;
    Addr low, high;
    VG_(thread_stack_reset_iter)(&t);
    while (VG_(thread_stack_next)(&t, &low, &high))
        if (a >= low && a <= high) {
            say("stack\t%u\n", t);
            return;
        }
    const NSegment* seg = VG_(am_find_nsegment)(a);
    const HChar* file = seg ? VG_(am_get_filename)(seg) : NULL;
    say("mapping\t%lu\t%.300s\n", seg ? a - seg->start : 0, file ? file : "(anonymous)");
}

/* By those of the foreground, then those of the background. */
static Int most_transfers_first(const void* p, const void* q) {
    const Line *a = *(Line* const*)p, *b = *(Line* const*)q;
    for (UInt k = COUNT_FOREGROUND; k < KINDS; k++)
        if (a->transfers[k] != b->transfers[k]) return a->transfers[k] < b->transfers[k] ? 1 : -1;
    return a->key < b->key ? -1 : a->key > b->key;
}

static Int most_of_site_first(const void* p, const void* q) {
    const Site *a = *(Site* const*)p, *b = *(Site* const*)q;
    return a->transfers != b->transfers ? (a->transfers < b->transfers ? 1 : -1) : a->ip < b->ip ? -1 : a->ip > b->ip;
}

/* Do two CPUs touch one byte of which one of them writes it? */
static Bool shares_bytes(const Line* l) {
    for (const Use* a = l->uses; a; a = a->next)
        for (const Use* b = l->uses; b; b = b->next)
            if (a != b && (a->written & (b->read | b->written))) return True;
    return False;
}

/* Did one CPU write it in this window, and another one touch it? Else it was written before the window. */
static Bool is_shared(const Line* l) {
    UInt n = 0;
    Bool written = False;
    for (const Use* u = l->uses; u; u = u->next, n++) written |= u->written != 0;
    return written && n > 1;
}

static void write_line(const Line* l) {
    ULong used = 0, written = 0;
    UInt count = 0;
    for (const Use* u = l->uses; u; u = u->next) {
        used |= 1ULL << u->cpu;
        if (u->written) written |= 1ULL << u->cpu;
    }
    say("line\t%#lx\t%s\t%llu\t%llu\t%#llx\t%#llx\n", l->key << LINE_BITS,
        is_shared(l) ? (shares_bytes(l) ? "true" : "false") : "before", l->transfers[COUNT_FOREGROUND], l->transfers[COUNT_BACKGROUND], used, written);
    for (const Site* s = l->sites; s; s = s->next) count++;
    Site** sites = VG_(malloc)("conflicts.sites", (count + 1) * sizeof *sites);
    count = 0;
    for (Site* s = l->sites; s; s = s->next) sites[count++] = s;
    VG_(ssort)(sites, count, sizeof *sites, most_of_site_first);
    if (count) put_place((l->key << LINE_BITS) + __builtin_ctzll(sites[0]->bytes));
    for (UInt i = 0; i < count && i < SITES_TOLD; i++) {
        const Site* s = sites[i];
        say("site\t%s%s%s%s\t%llu\t%#llx\t%#llx\n", s->access & READ ? "r" : "", s->access & WRITE ? "w" : "",
            s->access & LOCKED ? "l" : "", s->access & KERNEL ? "k" : "", s->transfers, s->cpus, s->bytes);
        put_frames(s->stack, s->frames);
    }
    VG_(free)(sites);
}

/* By what they cost, a transfer as much as some hundred instructions. */
static ULong cost(const Lock* l) { return l->instructions + 300 * (l->transfers + l->handoffs); }

static Int most_costly_first(const void* p, const void* q) {
    const Lock *a = *(Lock* const*)p, *b = *(Lock* const*)q;
    if (cost(a) != cost(b)) return cost(a) < cost(b) ? 1 : -1;
    return a->key < b->key ? -1 : a->key > b->key;
}

/* Those that more than one CPU took. */
static void write_locks(void) {
    UInt n = 0, told = 0, rest = 0;
    ULong rest_instructions = 0;
    Lock** all = (Lock**)VG_(HT_to_array)(locks, &n);
    if (!all) return;
    VG_(ssort)(all, n, sizeof *all, most_costly_first);
    for (UInt i = 0; i < n; i++) {
        const Lock* l = all[i];
        if (!(l->cpus & (l->cpus - 1))) continue;
        if (told++ >= LOCKS_TOLD) {
            rest++;
            rest_instructions += l->instructions;
            continue;
        }
        say("lock\t%#llx\t%llu\t%llu\t%llu\t%llu\n", l->cpus, l->holds, l->handoffs, l->instructions, l->transfers);
        put_frames(l->stack, l->frames);
    }
    say("locks\t%u\t%llu\n", rest, rest_instructions);
    VG_(free)(all);
}

static void write_report(const HChar* path) {
    SysRes opened = VG_(open)(path, VKI_O_WRONLY | VKI_O_CREAT | VKI_O_TRUNC, 0644);
    if (sr_isError(opened)) {
        VG_(umsg)("conflicts: cannot write %s\n", path);
        VG_(exit)(1);
    }
    report_fd = sr_Res(opened);
    report_used = 0;
    static const HChar* const names[] = { "not", "foreground", "background" };
    for (UInt k = COUNT_FOREGROUND; k < KINDS; k++) {
        say("sum\t%s\t%llu\t%llu\t%llu\t%llu\t%llu\n", names[k], sums[k].ops, sums[k].accesses, sums[k].locked, sums[k].clocks,
            sums[k].instructions);
        for (UInt c = 0; c < CALLS; c++)
            if (sums[k].calls[c]) say("call\t%s\t%u\t%u\n", names[k], c, sums[k].calls[c]);
    }
    UInt n = 0;
    Line** all = (Line**)VG_(HT_to_array)(lines, &n);
    if (all) {
        VG_(ssort)(all, n, sizeof *all, most_transfers_first);
        UInt told = 0, only_background = 0, rest = 0, rest_shared = 0;
        ULong rest_transfers[KINDS] = { 0 };
        for (UInt i = 0; i < n && (all[i]->transfers[COUNT_FOREGROUND] || all[i]->transfers[COUNT_BACKGROUND]); i++) {
            Bool tell = all[i]->transfers[COUNT_FOREGROUND] ? told++ < LINES_TOLD : only_background++ < BACKGROUND_TOLD;
            if (tell) {
                write_line(all[i]);
                continue;
            }
            rest++;
            rest_shared += is_shared(all[i]);
            for (UInt k = 0; k < KINDS; k++) rest_transfers[k] += all[i]->transfers[k];
        }
        say("rest\t%u\t%u\t%llu\t%llu\n", rest, rest_shared, rest_transfers[COUNT_FOREGROUND], rest_transfers[COUNT_BACKGROUND]);
        VG_(free)(all);
    }
    write_locks();
    say("end\n");
    VG_(write)(report_fd, report_buf, report_used);
    VG_(close)(report_fd);
}

/* ---- requests ---- */

static void clear_line(Line* l) {
    for (Use *u = l->uses, *next; u; u = next) next = u->next, VG_(free)(u);
    for (Site *s = l->sites, *next; s; s = next) next = s->next, VG_(free)(s);
    l->uses = NULL;
    l->sites = NULL;
    VG_(memset)(l->transfers, 0, sizeof l->transfers);
}

static void free_line(void* l) {
    clear_line(l);
    VG_(free)(l);
}

static void clear_counts(void) {
    Line* l;
    VG_(HT_ResetIter)(lines);
    while ((l = VG_(HT_Next)(lines))) clear_line(l);
    VG_(memset)(sums, 0, sizeof sums);
    VG_(HT_destruct)(locks, VG_(free));
    locks = VG_(HT_construct)("conflicts.locks");
}

static Bool on_request(ThreadId tid, UWord* arg, UWord* ret) {
    Thread* t = &threads[tid];
    *ret = 0;
    switch (arg[0]) {
    case REQ_PRESENT: *ret = 1; break;
    case REQ_MACHINE:
        tl_assert(arg[1] > 0 && arg[1] <= CPUS_MAX);
        VG_(HT_destruct)(lines, free_line);
        lines = VG_(HT_construct)("conflicts.lines");
        VG_(memset)(recent, 0, sizeof recent);
        VG_(memset)(sums, 0, sizeof sums);
        cpus = arg[1];
        break;
    case REQ_BEGIN:
        tl_assert(!t->inside && arg[1] < CPUS_MAX && arg[2] < KINDS);
        t->inside = True;
        t->cpu = arg[1];
        t->count = arg[2];
        t->began = instructions;
        t->held = 0;
        sums[t->count].ops++;
        inside++;
        break;
    case REQ_END:
        tl_assert(t->inside);
        t->inside = False;
        sums[t->count].instructions += instructions - t->began;
        inside--;
        break;
    case REQ_CLEAR: clear_counts(); break;
    case REQ_REPORT: write_report((const HChar*)arg[1]); break;
    case REQ_ALLOCATED: add_block(tid, arg[1], arg[2]); break;
    case REQ_FREED: forget_block(arg[1]); break;
    case REQ_LOCKED: on_locked(tid, arg[1]); break;
    case REQ_UNLOCKED: on_unlocked(tid, arg[1]); break;
    default: return False;
    }
    return True;
}

/* ---- the tool ---- */

static void on_thread_exit(ThreadId tid) {
    if (threads[tid].inside) inside--;
    threads[tid].inside = False;
}

static void after_options(void) {}
static void at_end(Int code) {}

static void before_options(void) {
    VG_(details_name)("conflicts");
    VG_(details_version)(NULL);
    VG_(details_description)("cache lines that virtual CPUs share");
    VG_(details_copyright_author)("The braidfs developers. GPL-2.0-or-later.");
    VG_(details_bug_reports_to)("the braidfs developers");
    VG_(details_avg_translation_sizeB)(500);
    VG_(basic_tool_funcs)(after_options, instrument, at_end);
    VG_(needs_client_requests)(on_request);
    VG_(needs_syscall_wrapper)(before_call, after_call);
    VG_(track_pre_mem_read)(on_kernel_read);
    VG_(track_post_mem_write)(on_kernel_write);
    VG_(track_pre_thread_ll_exit)(on_thread_exit);
    lines = VG_(HT_construct)("conflicts.lines");
    locks = VG_(HT_construct)("conflicts.locks");
    blocks = VG_(OSetGen_Create)(0, NULL, VG_(malloc), "conflicts.blocks", VG_(free));
}

VG_DETERMINE_INTERFACE_VERSION(before_options)
