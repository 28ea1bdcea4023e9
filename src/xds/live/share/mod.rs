//! Shares of the namespaces in the limits of live objects.
//!
//! Beyond the limits the namespace with the most objects, or bytes, loses some. It is closed until
//! a list has all of them, as an object that is not known could restrict a service. The objects
//! that it keeps still claim names and addresses, so those that claim nothing go first.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Bound;
use std::sync::Arc;

use super::{JUDGED, List, LiveObject, PLACE, State, Watched, condition};
use crate::yaml::{Finding, Place, Severity};

/// Kinds of objects in namespaces, in the order in which a namespace loses them. Claims of names,
/// which others would get, go last, after the strongest evidence for an address.
const ORDER: [&str; 9] = [
    "ServiceExport",
    "GlobalTrafficPolicy",
    "Dependency",
    "ServiceImport",
    "EndpointSlice",
    "Service",
    "Pod",
    "RemoteServiceBinding",
    "ServiceExpositionPolicy",
];

/// Part of the limits that a namespace makes free at once, so that the largest one is rarely
/// searched for.
const FREED: usize = 64;

/// Limit of the objects of a list that are left out and wait for a condition. Those that have it
/// make room for others in the next list.
const LEFT_OUT_MAX: usize = 1000;

/// Number of objects and of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) objects: usize,
    pub(super) bytes: usize,
}

/// Room for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// It fits, if need be because others were removed.
    Fits,
    /// Its namespace has no share for it.
    LeftOut,
    /// Objects without a namespace take up the limits.
    Full,
}

impl Size {
    fn plus(self, other: Self) -> Self {
        Self { objects: self.objects + other.objects, bytes: self.bytes + other.bytes }
    }

    /// Returns the larger number of both, and the larger number of bytes.
    fn or_more(self, other: Self) -> Self {
        Self { objects: self.objects.max(other.objects), bytes: self.bytes.max(other.bytes) }
    }

    fn fits(self, limits: Self) -> bool {
        self.objects <= limits.objects && self.bytes <= limits.bytes
    }
}

impl State {
    /// Adds an object to the list that has begun, or to the last one. Returns whether the contents
    /// have changed.
    pub(super) fn put(
        &mut self,
        kind: &'static str,
        object: &Arc<LiveObject>,
        in_list: bool,
        limits: Size,
    ) -> (bool, Room) {
        let Some(list) = self.list_mut(kind, in_list) else { return (false, Room::Fits) };
        let known = list.objects.get(&object.name);
        if known.is_some_and(|known| Arc::ptr_eq(known, object)) {
            return (false, Room::Fits);
        }
        let is_known = list.remove(&object.name);
        list.bytes += object.bytes;
        list.objects.insert(object.name.clone(), Arc::clone(object));
        let (has_removed, room) = self.make_room(kind, object, in_list, limits);
        let Some(watched) = self.kinds.get_mut(kind) else { return (has_removed, room) };
        watched.is_over |= room == Room::Full;
        let list = watched.list_mut(in_list);
        let is_new = match room {
            Room::Fits => true,
            Room::LeftOut => list.leave_out(object, limits),
            Room::Full => list.remove(&object.name),
        };
        let is_changed = !in_list && (is_known || is_new);
        (is_changed || has_removed || room == Room::Full, room)
    }

    /// Removes objects of the largest namespace until a new one fits, which is counted already.
    /// Returns whether contents have changed by that.
    fn make_room(
        &mut self,
        kind: &'static str,
        object: &LiveObject,
        in_list: bool,
        limits: Size,
    ) -> (bool, Room) {
        let namespace = object.namespace();
        let freed = Size {
            objects: limits.objects / FREED + 1,
            bytes: limits.bytes / FREED + object.bytes,
        };
        let mut has_removed = false;
        loop {
            let size = self.size();
            if size.fits(limits) {
                return (has_removed, Room::Fits);
            }
            // The search looks at all objects, so a namespace that has lost some causes none until
            // it is listed again.
            let largest = if self.is_closed(namespace, kind, in_list) {
                namespace.into()
            } else {
                self.largest(size.objects > limits.objects)
            };
            if largest.is_empty() {
                return (has_removed, Room::Full);
            }
            let is_own = *largest == *namespace;
            let order = ORDER.iter().copied();
            let lost: Vec<_> = order.take_while(|of| !is_own || *of != kind).collect();
            if !self.remove_of(&largest, &lost, freed, limits) {
                return (has_removed, Room::LeftOut);
            }
            has_removed = true;
        }
    }

    /// Removes objects of a namespace, of these kinds, until each list has lost so much. Returns
    /// false if there are none.
    fn remove_of(
        &mut self,
        namespace: &str,
        kinds: &[&'static str],
        freed: Size,
        limits: Size,
    ) -> bool {
        let mut most = Size::default();
        for kind in kinds {
            let Some(watched) = self.kinds.get_mut(kind) else { continue };
            let lists = [Some(&mut watched.objects), watched.next.as_mut()];
            let of_kind = lists.into_iter().flatten();
            let removed = of_kind.map(|list| list.remove_of(namespace, freed, limits));
            most = most.plus(removed.fold(Size::default(), Size::or_more));
            if most.objects >= freed.objects || most.bytes >= freed.bytes {
                break;
            }
        }
        most != Size::default()
    }

    /// Returns whether objects of a namespace are left out: of the list of a kind that has begun,
    /// or of any list.
    fn is_closed(&self, namespace: &str, kind: &str, in_list: bool) -> bool {
        let is_partial = |list: &List| list.partial.contains(namespace);
        if in_list {
            let next = self.kinds.get(kind).and_then(|watched| watched.next.as_ref());
            return next.is_some_and(is_partial);
        }
        self.kinds.values().flat_map(Watched::lists).any(is_partial)
    }

    /// Returns the namespace with the most objects, or with the most bytes. Objects without one
    /// have an empty name.
    fn largest(&self, by_number: bool) -> Arc<str> {
        let rank = |size: Size| if by_number { size.objects } else { size.bytes };
        let mut sizes = HashMap::<_, Size>::new();
        let lists = self.kinds.values();
        let lists = lists.flat_map(|of| of.lists().max_by_key(|list| rank(list.size())));
        for object in lists.flat_map(|list| list.objects.values()) {
            let size = sizes.entry(object.namespace()).or_default();
            *size = size.plus(Size { objects: 1, bytes: object.bytes });
        }
        let largest = sizes.iter().max_by_key(|(name, size)| (rank(**size), **name));
        largest.map_or_else(Arc::default, |(name, _)| (*name).into())
    }

    /// Returns the size of all kinds, by the larger list of each.
    fn size(&self) -> Size {
        let sizes = self.kinds.values().map(|of| of.lists().map(List::size));
        let sizes = sizes.map(|lists| lists.fold(Size::default(), Size::or_more));
        sizes.fold(Size::default(), Size::plus)
    }

    fn list_mut(&mut self, kind: &str, in_list: bool) -> Option<&mut List> {
        self.kinds.get_mut(kind).map(|watched| watched.list_mut(in_list))
    }
}

impl Watched {
    fn lists(&self) -> impl Iterator<Item = &List> {
        [&self.objects].into_iter().chain(&self.next)
    }

    /// Returns the list that has begun, or the last one.
    fn list_mut(&mut self, in_list: bool) -> &mut List {
        self.next.as_mut().filter(|_| in_list).unwrap_or(&mut self.objects)
    }
}

impl List {
    fn size(&self) -> Size {
        Size { objects: self.objects.len(), bytes: self.bytes }
    }

    /// Removes an object, and returns whether there was one.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        self.left_out.remove(name);
        let removed = self.objects.remove(name);
        self.bytes -= removed.as_ref().map_or(0, |removed| removed.bytes);
        removed.is_some()
    }

    /// Leaves an object out, and returns whether its namespace is closed by that.
    fn leave_out(&mut self, object: &LiveObject, limits: Size) -> bool {
        self.remove(&object.name);
        let namespace = object.namespace().into();
        let is_judged = JUDGED.contains(&object.kind.0) && self.left_out.len() < LEFT_OUT_MAX;
        if is_judged && !object.has(&condition::of(&[], &[&finding(&namespace, limits)], &[])) {
            let (kind, name, uid) = (object.kind.clone(), object.name.clone(), object.uid.clone());
            let generation = object.generation;
            let left_out = LiveObject { kind, name, generation, uid, ..LiveObject::default() };
            self.left_out.insert(object.name.clone(), Arc::new(left_out));
        }
        self.partial.insert(namespace)
    }

    /// Leaves out objects of a namespace until so much is removed, or none is left.
    fn remove_of(&mut self, namespace: &str, wanted: Size, limits: Size) -> Size {
        // `0` follows `/`.
        let (start, end) = (format!("{namespace}/"), format!("{namespace}0"));
        let range = (Bound::Included(&*start), Bound::Excluded(&*end));
        let mut removed = Size::default();
        while removed.objects < wanted.objects && removed.bytes < wanted.bytes {
            let last = self.objects.range::<str, _>(range).next_back();
            let Some(object) = last.map(|(_, object)| Arc::clone(object)) else { break };
            self.leave_out(&object, limits);
            removed = removed.plus(Size { objects: 1, bytes: object.bytes });
        }
        removed
    }
}

/// Returns the finding about a namespace of which objects are left out.
pub(super) fn finding(namespace: &Arc<str>, limits: Size) -> Finding {
    let what = format!(
        "namespace {namespace} is closed: it has the most of more than {} objects, or of more than \
         {} MiB in them, and some of its objects are left out",
        limits.objects,
        limits.bytes >> 20
    );
    let place = Place { file: PLACE.into(), line: 0 };
    let warning = Finding::warning(&place, what, "a ResourceQuota into it").of(namespace);
    Finding { severity: Severity::PassedOver, ..warning }
}

/// Returns the description of limits that objects without a namespace take up.
pub(super) fn over(limits: Size) -> String {
    format!(
        "more than {} objects, or {} MiB in them, are too many, and most are Namespaces and Nodes; \
         the last state stays in use",
        limits.objects,
        limits.bytes >> 20
    )
}
