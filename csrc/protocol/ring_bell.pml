/* May several threads of one side ring the same bell?
 *
 * Copy threads of the daemon publish cells independently. The bell must be advanced by one atomic read-modify-write: with a load and a
 * store a thread can set it back to the value that the sleeper has read, and the sleeper then misses a wake-up. Fences are in
 * place here (ring_wake shows that they are needed), so stores are visible at once. */

#define PUBLISHERS 2
#define CELLS 2         /* per publisher */

byte cell[PUBLISHERS];
byte bell;
bool asleep, queued;

proctype Publisher(byte me)
{
	byte value;
	do
	:: cell[me] == CELLS -> break
	:: else ->
		cell[me]++;
		if
		:: asleep ->
#ifdef BELL_NOT_ATOMIC
			value = bell;
			bell = value + 1;
#else
			bell++;
#endif
			queued = false
		:: else
		fi
	od
}

proctype Sleeper()
{
	byte want, seen;
	do
	:: want == PUBLISHERS * CELLS -> break
	:: else ->
		want++;
		do
		:: cell[0] + cell[1] >= want -> break
		:: else ->
			seen = bell;
			asleep = true;
			if
			:: cell[0] + cell[1] >= want -> break
			:: else
			fi;
			if
			:: atomic { bell == seen -> queued = true }; !queued
			:: bell != seen
			fi
		od;
		asleep = false
	od
}

init
{
	atomic { run Publisher(0); run Publisher(1); run Sleeper() }
}
