/* Is every cell read as the answer to its own ticket, and is nothing overwritten that is still needed?
 *
 * A worker posts TICKETS tickets into a ring of N; a ticket has one or two runs, or is a hint without an answer. The daemon's one
 * thread takes tickets in order and completes runs in any order, as their reads land. It copies a ticket when it takes it, but runs
 * and pairs only when it serves them, so their area is needed until the ticket is terminal. Either side may crash at any step.
 *
 * OVERRUN is a fault, not a bug of the protocol: a worker that ignores credit. It may end at a deadline, but never with a wrong
 * answer, provided that a cell is stored and loaded in one piece. With credit two steps suffice. */

#define N 2
#define RUNS 2

#if defined(CELL_GE_INSTEAD_OF_EQ) || defined(TORN_CELL)
#define OVERRUN
#endif
#ifdef OVERRUN
#define TICKETS 3       /* one more than the ring holds */
#define ALL_COLLECTED (collected(1) && collected(2) && collected(3))
#else
#define TICKETS 4       /* every place in the ring is used twice */
#define ALL_COLLECTED (collected(1) && collected(2) && collected(3) && collected(4))
#endif
#if !defined(OVERRUN) || defined(TORN_CELL)
#define CELL_IN_TWO_STEPS
#endif

#define WORKER 1
#define DAEMON 2
byte crashed;

typedef Ticket { byte seq; byte first; byte last; byte runs }   /* first and last stand for the pairs, written one by one */
typedef Cells { byte seq[RUNS]; byte status[RUNS] }             /* status holds the ticket that was answered */
typedef Flags { bool is[RUNS] }

Ticket area[N];                                 /* requests memfd */
Cells done[N];                                  /* completions memfd */
byte consumed;

byte runs_of[TICKETS + 1];                      /* worker: 0 is a hint */
Flags got[TICKETS + 1];
byte next_post = 1;

byte next_take = 1;                             /* daemon: a table of N tickets in flight */
byte table[N];                                  /* ticket, 0 if free */
bool answered[N];
byte todo[N], remaining[N];
bool terminal[TICKETS + 1];

#define collected(u) \
	((runs_of[u] < 1 || got[u].is[0]) && (runs_of[u] < 2 || got[u].is[1]))

#if defined(OVERRUN)
#define CREDIT true
#elif defined(CREDIT_OFF_BY_ONE)
#define CREDIT (next_post <= N + 1 || (consumed >= next_post - N - 1 && collected(next_post - N - 1)))
#elif defined(CONSUMED_ONLY)
#define CREDIT (next_post <= N || consumed >= next_post - N)
#elif defined(CELLS_ONLY)
#define CREDIT (next_post <= N || collected(next_post - N))
#else
#define CREDIT (next_post <= N || (consumed >= next_post - N && collected(next_post - N)))
#endif

#ifdef CELL_GE_INSTEAD_OF_EQ
#define ready(u, r) (done[(u) % N].seq[r] >= u)
#else
#define ready(u, r) (done[(u) % N].seq[r] == u)
#endif

inline post()
{
	if
	:: runs_of[next_post] = 0
	:: runs_of[next_post] = 1
	:: runs_of[next_post] = 2
	fi;
#ifdef SEQ_BEFORE_RUNS
	area[next_post % N].seq = next_post;
#endif
	area[next_post % N].runs = runs_of[next_post];
	area[next_post % N].first = next_post;
	area[next_post % N].last = next_post;
#ifndef SEQ_BEFORE_RUNS
	area[next_post % N].seq = next_post;
#endif
	next_post++
}

/* The status must answer this ticket, not another one. */
#ifdef CELL_IN_TWO_STEPS
#define COLLECT(u, r) \
	:: u < next_post && r < runs_of[u] && !got[u].is[r] && ready(u, r) -> \
		assert(done[(u) % N].status[r] == u); got[u].is[r] = true
#else
#define COLLECT(u, r) \
	:: atomic { u < next_post && r < runs_of[u] && !got[u].is[r] && ready(u, r) -> \
		assert(done[(u) % N].status[r] == u); got[u].is[r] = true }
#endif

proctype Worker()
{
	{
		do
		:: next_post <= TICKETS && CREDIT -> post()
#ifdef CREDIT_ASKED_ONCE
		:: next_post == N + 1 && runs_of[1] > 0 && collected(1) && !CREDIT -> assert(false)
#endif
		COLLECT(1, 0) COLLECT(2, 0) COLLECT(3, 0)
		COLLECT(1, 1) COLLECT(2, 1) COLLECT(3, 1)
#ifndef OVERRUN
		COLLECT(4, 0) COLLECT(4, 1)
#endif
		:: next_post > TICKETS && ALL_COLLECTED -> break
#ifdef OVERRUN
		:: timeout -> break
#else
		:: timeout && crashed == DAEMON -> break        /* the deadline: nothing else can happen any more */
#endif
		od
	} unless { crashed == WORKER }
}

inline advance()
{
	d_step {
#ifdef CONSUMED_MAX
		consumed = (t > consumed -> t : consumed);
#else
		do
		:: consumed < TICKETS && terminal[consumed + 1] -> consumed++
		:: else -> break
		od;
#endif
	}
}

/* It looks at the next ticket alone. */
inline take()
{
	s = next_take % N;
	assert(table[s] == 0);                          /* credit also bounds the daemon's own table */
	d_step {
		answered[s] = area[s].runs > 0;
		todo[s] = (area[s].runs > 0 -> area[s].runs : 1);
		remaining[s] = todo[s];
		table[s] = next_take;
#ifdef CONSUMED_AT_TAKE
		consumed = next_take;
#endif
		next_take++;
		s = 0
	}
}

inline complete()
{
	/* the last portion's pairs */
#ifndef OVERRUN
	assert(area[s].first == t);
	assert(area[s].last == t);
#endif
	if
	:: answered[s] ->
#if defined(SEQ_BEFORE_STATUS)
		done[s].seq[r] = t;
		done[s].status[r] = t
#elif defined(CELL_IN_TWO_STEPS)
		done[s].status[r] = t;
		done[s].seq[r] = t
#else
		d_step { done[s].status[r] = t; done[s].seq[r] = t }
#endif
	:: else
	fi;
	atomic {
		remaining[s]--;
		if
		:: remaining[s] == 0 -> table[s] = 0; terminal[t] = true; advance()
		:: else
		fi;
		s = 0; r = 0; t = 0
	}
}

proctype Loop()
{
	byte s, r, t;
	{
end:		do
#ifdef OVERRUN
		:: next_take <= TICKETS && area[next_take % N].seq == next_take && table[next_take % N] == 0 -> take()
#else
		:: next_take <= TICKETS && area[next_take % N].seq == next_take -> take()
#endif
		:: atomic {
				if
				:: todo[0] > 0 -> s = 0
				:: todo[1] > 0 -> s = 1
				fi;
				todo[s]--;
				r = todo[s];
				t = table[s]
			};
			complete()
		od
	} unless { crashed == DAEMON }
}

init
{
	atomic { run Worker(); run Loop() };
	if
	:: crashed = WORKER
	:: crashed = DAEMON
	:: skip
	fi
}
