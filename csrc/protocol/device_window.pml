/* Does a device read, after a cell, what the cell stands for, and is nothing overwritten that it or the daemon still reads?
 *
 * The window lies in the device's memory. The daemon's stores to it stay in write-combining buffers until sfence, and then on their way
 * over the bus until a flush; cells lie in the host's memory, which the device reads over the bus. Nothing orders one of these ways
 * with the other but the flush. A device keeps credit by what it can load: the cells of ticket t - N, all of them read. Its ring has no
 * hints, so that is enough (ring_credit shows that with hints it is not). The ticket t goes to place t mod N, as a slot's next layer's
 * and next step's do. Either side may crash at any step. */

#define N 2
#define TICKETS 4
#define WORKER 1
#define DAEMON 2

byte crashed;
byte seq[N], pairs[N];          /* requests: stored by the device, in order behind its fence (device_wake) */
byte cell[N];                   /* completions */
byte combined[N], moving[N];    /* stores to a place: in a core's buffer, on the bus; 0: none */
byte window[N];
byte table[N];                  /* daemon: ticket in flight, 0 if free */
bool done_reading[TICKETS + 1];
bool collected[TICKETS + 1];

#define PLACE(t) ((t) % N)

/* Buffers are emptied and writes arrive when they like. */
proctype Bus()
{
	byte p;
end:	do
	:: d_step { combined[0] > 0 -> moving[0] = combined[0]; combined[0] = 0 }
	:: d_step { combined[1] > 0 -> moving[1] = combined[1]; combined[1] = 0 }
	:: d_step { moving[0] > 0 -> window[0] = moving[0]; moving[0] = 0 }
	:: d_step { moving[1] > 0 -> window[1] = moving[1]; moving[1] = 0 }
	od
}

#ifdef NO_CREDIT
#define CREDIT true
#elif defined(READ_AFTER_POST)
#define CREDIT (next <= N || collected[next - N])
#else
#define CREDIT (next <= N || (collected[next - N] && done_reading[next - N]))
#endif

/* Posts when it may; waits for its answers in order; reads each place twice, as attention of two query heads does. */
proctype Device()
{
	byte next = 1, want = 1, reading = 1, value;
	{
		do
		:: next <= TICKETS && CREDIT -> pairs[next % N] = next; seq[next % N] = next; next++
#ifdef LOAD_BEFORE_CELL
		:: want < next && want == reading -> value = window[PLACE(want)];
			cell[want % N] == want;
			assert(value == want);
			collected[want] = true; done_reading[want] = true; want++; reading++
#else
		:: want < next && cell[want % N] == want -> collected[want] = true; want++
		:: reading < want ->
			assert(window[PLACE(reading)] == reading);
			assert(window[PLACE(reading)] == reading);
			done_reading[reading] = true; reading++
#endif
		:: reading > TICKETS -> break
		:: timeout && crashed == DAEMON -> break        /* the deadline */
		od
	} unless { crashed == WORKER }
}

inline sfence() { combined[0] == 0 && combined[1] == 0 }
inline flush() { moving[0] == 0 && moving[1] == 0 }

proctype Loop()
{
	byte next = 1, s, t;
	{
end:		do
		:: next <= TICKETS && seq[next % N] == next ->
			assert(table[next % N] == 0);
			table[next % N] = next;
			next++
		:: atomic {
				if
				:: table[0] > 0 -> s = 0
				:: table[1] > 0 -> s = 1
				fi;
				t = table[s]
			};
			assert(pairs[s] == t);
#ifdef CELL_BEFORE_STORES
			cell[s] = t;
#endif
			combined[PLACE(t)] = t;
#ifdef FLUSH_BEFORE_FENCE
			flush();
			sfence();
#else
#ifndef NO_FENCE_BEFORE_FLUSH
			sfence();
#endif
#ifndef NO_FLUSH
			flush();
#endif
#endif
			cell[s] = t;
			table[s] = 0
		od
	} unless { crashed == DAEMON }
}

init
{
	atomic { run Bus(); run Device(); run Loop() };
	if
	:: crashed = WORKER
	:: crashed = DAEMON
	:: skip
	fi
}
