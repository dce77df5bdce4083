package model

// An access of magazine.c, by the name of its order there.
type site int

const (
	wordLook site = iota
	wordLock
	wordUnlock
	slotLook
	slotKeep
	goLook
	turnRaise
	turnLower
	turnLook
	keyLook
	keyClaim
	keyTake
	keyGive
	keyScan
	keyForget
	infoLook
	infoKeep
	nameLook
	nameKeep
	namesLock
	namesUnlock
	failed
	sites
)

// sitesOfC are the sites' names in magazine.c.
var sitesOfC = [sites]string{"WORD_LOOK", "WORD_LOCK", "WORD_UNLOCK", "SLOT_LOOK", "SLOT_KEEP", "GO_LOOK", "TURN_RAISE",
	"TURN_LOWER", "TURN_LOOK", "KEY_LOOK", "KEY_CLAIM", "KEY_TAKE", "KEY_GIVE", "KEY_SCAN", "KEY_FORGET", "INFO_LOOK",
	"INFO_KEEP", "NAME_LOOK", "NAME_KEEP", "NAMES_LOCK", "NAMES_UNLOCK", "FAILED"}

// orders are the order of each site.
type orders [sites]order

// ordersOfC are those of magazine.c; TestOrders compares them.
var ordersOfC = orders{
	wordLook:    relaxed,
	wordLock:    acquire,
	wordUnlock:  release,
	slotLook:    relaxed,
	slotKeep:    relaxed,
	goLook:      acquire,
	turnRaise:   seqCst,
	turnLower:   release,
	turnLook:    seqCst,
	keyLook:     relaxed,
	keyClaim:    seqCst,
	keyTake:     acquire,
	keyGive:     release,
	keyScan:     seqCst,
	keyForget:   release,
	infoLook:    relaxed,
	infoKeep:    relaxed,
	nameLook:    acquire,
	nameKeep:    release,
	namesLock:   acquire,
	namesUnlock: release,
	failed:      relaxed,
}

// with is the orders with one site's changed.
func (o orders) with(s site, to order) orders {
	o[s] = to
	return o
}
