/* Can a late store reach a live window, or a dead ring give an answer?
 *
 * A worker registers (window, ring, mapping in the daemon) up to twice. In each registration it waits for two tickets, as two layers of
 * one step do; a deadline may pass at any wait. The daemon's copy thread may be arbitrarily slow (stopped, and later woken), may
 * poison, and either process may crash at any step; a crashed daemon is restarted without its mappings. */

#define REGISTRATIONS 2
#define TICKETS 2
#define NOWHERE 9

bool worker_poison[REGISTRATIONS];
bool daemon_poison[REGISTRATIONS];
byte seq[REGISTRATIONS];                        /* posted */
byte cell[REGISTRATIONS];                       /* highest ticket completed */
byte written[REGISTRATIONS];                    /* ghost: tickets whose data lie whole in the window */

byte live = NOWHERE;                            /* ghost: the window that the worker uses */
byte window_of[REGISTRATIONS];

byte mapping[REGISTRATIONS];                    /* the daemon's address space: address -> window */
byte address_of[REGISTRATIONS];
byte inflight[REGISTRATIONS];
bool wanted[REGISTRATIONS], registered[REGISTRATIONS], retired[REGISTRATIONS];

bool worker_crashed, worker_ended, daemon_crashed;

#define DEAD(g) (worker_poison[g] || daemon_poison[g])

#ifdef UNMAP_EARLY
#define RETIRE(g) (registered[g] && !retired[g] && (DEAD(g) || worker_ended))
#else
#define RETIRE(g) (registered[g] && !retired[g] && (DEAD(g) || worker_ended) && inflight[g] == 0)
#endif

/* A wait looks at both poison words first; its deadline may pass at any time. */
inline wait(g, t)
{
	if
#ifdef CELL_BEFORE_POISON
	:: cell[g] >= t -> answer = true
	:: cell[g] < t && DEAD(g) -> answer = false
#else
	:: DEAD(g) -> answer = false
	:: !DEAD(g) && cell[g] >= t -> answer = true
#endif
	:: !DEAD(g) && cell[g] < t -> atomic { worker_poison[g] = true; live = NOWHERE }; answer = false
#ifdef POISON_NOT_FINAL
		; worker_poison[g] = false      /* "the next layer may be luckier" */
#endif
	fi;
	if
	:: answer ->
		assert(!abandoned);             /* a dead ring answers nothing more */
		assert(written[g] >= t)
	:: else -> abandoned = true
	fi
}

proctype Worker()
{
	byte g;
	bool answer, abandoned;
	{
		do
		:: g == REGISTRATIONS -> break
		:: else ->
#ifdef KEEP_WINDOW
			window_of[g] = 0;
#else
			window_of[g] = g;
#endif
			wanted[g] = true;
			registered[g];
			atomic { live = window_of[g]; abandoned = false };
			seq[g] = 1;
			seq[g] = 2;
			wait(g, 1);
			wait(g, 2);
			if
			:: !abandoned -> break
			:: else ->
				atomic { worker_poison[g] = true; live = NOWHERE };     /* the daemon's poison is answered in kind */
				g++
			fi
		od
	} unless { worker_crashed };
	live = NOWHERE;
	worker_ended = true
}

inline store(g)
{
	assert(mapping[address_of[g]] == window_of[g]);         /* neither unmapped nor another window */
	assert(!worker_poison[g] || live != window_of[g])      /* a late store lands in an abandoned window only */
}

proctype Copier(byte g)
{
	byte t = 1;
	{
end:		do
		:: t > TICKETS || DEAD(g) || worker_ended -> break
		:: t <= TICKETS && seq[g] >= t ->
			inflight[g]++;          /* count first, look second */
			if
			:: DEAD(g) || worker_ended -> inflight[g]--; break
			:: else
			fi;
			if
			:: daemon_poison[g] = true; inflight[g]--; break
			:: true
			fi;
			store(g);
			store(g);
			written[g] = t;
			cell[g] = t;
			inflight[g]--;
			t++
		od
	} unless { daemon_crashed && g == 0 }
}

/* Registers, and retires what is dead. A restart has no copy of registration 0 in flight and no mapping of it. */
proctype Control()
{
end:	do
	:: wanted[0] && !registered[0] -> atomic { mapping[0] = window_of[0]; address_of[0] = 0; registered[0] = true; run Copier(0) }
	:: wanted[1] && !registered[1] -> atomic {
			if
			:: mapping[0] == NOWHERE -> address_of[1] = 0   /* the kernel hands out a free address again */
			:: else -> address_of[1] = 1
			fi;
			mapping[address_of[1]] = window_of[1];
			registered[1] = true;
			run Copier(1)
		}
	:: RETIRE(0) -> atomic { mapping[address_of[0]] = NOWHERE; retired[0] = true }
	:: RETIRE(1) -> atomic { mapping[address_of[1]] = NOWHERE; retired[1] = true }
	od
}

init
{
	mapping[0] = NOWHERE; mapping[1] = NOWHERE;
	atomic { run Worker(); run Control() };
	if
	:: worker_crashed = true
	:: atomic { daemon_crashed = true; inflight[0] = 0 }
	:: true
	fi
}

/* Whatever dies, the worker ends (at a deadline), and what it has left is given back. */
ltl all_retired { <> (worker_ended && (registered[0] -> retired[0]) && (registered[1] -> retired[1])) }
