/* A device that pulls reads the daemon's frames itself: does it ever take what it read for what it asked for when it is not, is every
 * ticket answered by a tier that is smaller than it, and is every frame free again in the end?
 *
 * The device is the straight line of a graph: it posts a layer's ticket, waits for the cell of the one before, and its programs, one for
 * each record, read that one's records; who ends last looks for poison and then says, with the word `released`, that all has been read. A record
 * lies in a frame, which then stays pinned, or was copied to its place in the landing. The daemon keeps so many pins at most, evicts
 * whatever is not pinned, also for others, and pins for a bounded time, after which it poisons the ring and gives the pins up. Either
 * side may crash at any step. */

#define TICKETS 2
#define RECORDS 3
#define FRAMES 2
#define PINS_MAX 1
#define LANDED 9
#define WORKER 1
#define DAEMON 2

#define ID(t, r) ((t - 1) * RECORDS + r + 1)

byte crashed;
byte posted, answered;          /* tickets */
byte where[TICKETS * RECORDS + 1];      /* lines: a frame, or LANDED */
byte released;
bool poisoned;
bool done;                      /* device: the step is over */

byte holds[FRAMES];             /* which record */
byte pinned[FRAMES];            /* for which ticket; 0: for none */

#ifdef RELEASED_BY_THE_FIRST
#define BY_THE_FIRST(t) released = t
#define BY_THE_LAST(t) skip
#else
#define BY_THE_FIRST(t) skip
#define BY_THE_LAST(t) released = t
#endif

#ifdef RELEASED_BEFORE_READ
#define BEFORE(t) released = t
#elif defined(POISON_READ_FIRST)
#define BEFORE(t) error = poisoned
#else
#define BEFORE(t) skip
#endif

#if defined(POISON_NOT_READ) || defined(POISON_READ_FIRST)
#define AFTER skip
#else
#define AFTER error = poisoned
#endif

#define read(t, r) torn = torn || (where[ID(t, r)] != LANDED && holds[where[ID(t, r)]] != ID(t, r))

inline gather(t)
{
	torn = false; error = false;
	BEFORE(t);
	read(t, 0);
	BY_THE_FIRST(t);
	read(t, 1);
	read(t, 2);
	AFTER;
	assert(!torn || error);
	BY_THE_LAST(t)
}

#define POST(t) posted = t
#define ARRIVE(t) \
	if \
	:: answered >= t && !poisoned \
	:: poisoned || crashed == DAEMON -> goto over   /* its deadline */ \
	fi

proctype Device()
{
	bool torn, error;
	{
		POST(1); POST(2);
		ARRIVE(1);
#ifdef GATHER_OUT_OF_ORDER
		ARRIVE(2); gather(2); gather(1);
#else
		gather(1);
		ARRIVE(2); gather(2);
#endif
over:		done = true
	} unless { crashed == WORKER }
}

#define PINS ((pinned[0] > 0) + (pinned[1] > 0))

#ifdef NO_FALLBACK
#define MAY_PIN true
#define MAY_COPY false
#else
#define MAY_PIN (PINS < PINS_MAX)
#define MAY_COPY true
#endif

#ifdef UNPIN_AT_ANSWER
#define PIN(f, t) skip
#else
#define PIN(f, t) pinned[f] = t
#endif

#ifdef RELEASED_TAKEN_AS_NEXT
#define HAS_READ(t) (released + 1 >= t)
#else
#define HAS_READ(t) (released >= t)
#endif

#define ANY_PINNED (pinned[0] > 0 || pinned[1] > 0)
#define TIME_IS_OVER (crashed == WORKER || (ANY_PINNED && (pinned[0] <= answered && pinned[1] <= answered)))
#define GIVE_UP pinned[0] = 0; pinned[1] = 0

inline serve(f)
{
	holds[f] = 0;                           /* evicted, and read anew */
	holds[f] = ID(t, r);
	if
	:: MAY_PIN -> PIN(f, t); where[ID(t, r)] = f
	:: MAY_COPY -> where[ID(t, r)] = LANDED
	fi;
	r++;
	if
	:: r == RECORDS -> answered = t; t++; r = 0
	:: else
	fi
}

proctype Loop()
{
	byte t = 1, r = 0;
	{
end:		do
		:: t <= posted && !poisoned && pinned[0] == 0 -> serve(0)
		:: t <= posted && !poisoned && pinned[1] == 0 -> serve(1)
		:: pinned[0] == 0 && holds[0] != 0 -> holds[0] = 0      /* somebody else's */
		:: pinned[1] == 0 && holds[1] != 0 -> holds[1] = 0
		:: pinned[0] > 0 && HAS_READ(pinned[0]) -> pinned[0] = 0
		:: pinned[1] > 0 && HAS_READ(pinned[1]) -> pinned[1] = 0
#if defined(UNPIN_WITHOUT_POISON)
		:: TIME_IS_OVER && ANY_PINNED -> GIVE_UP
#elif defined(UNPIN_BEFORE_POISON)
		:: TIME_IS_OVER && !poisoned -> GIVE_UP; holds[0] = 0; holds[1] = 0; poisoned = true
#elif !defined(PINS_FOR_EVER)
		:: TIME_IS_OVER && !poisoned -> poisoned = true; GIVE_UP
#endif
		od
	} unless { crashed == DAEMON }
}

/* The frames of a daemon that lives are free once its worker is done, and a worker of a daemon that lives is done. */
proctype Judge()
{
	(timeout);
	assert(crashed == DAEMON || !ANY_PINNED);
	assert(crashed == WORKER || done)
}

init
{
	atomic { run Device(); run Loop(); run Judge() };
	if
	:: crashed = WORKER
	:: crashed = DAEMON
	:: skip
	fi
}
