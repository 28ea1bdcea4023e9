//! Ports of Services, imports and slices, joined by name.

use std::collections::BTreeMap;

use super::limited::LimitedFindings;
use super::meta::Meta;
use crate::yaml::{Finding, Value};

/// Limit of the ports of an object: that of a service of a control plane. Each endpoint has all of
/// them.
const PORTS_MAX: usize = 1024;

/// TCP port.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Port {
    /// Name; a single port may have none.
    pub(super) name: Box<str>,
    /// Port number; in a slice, the number at the endpoints.
    pub(super) number: u16,
    /// Target port, if a Service has a numeric one; otherwise 0.
    pub(super) target: u16,
}

/// Reads a list of ports. Ports of other protocols are left out, and so are ports of a slice
/// without a number, which mean all ports. Returns none if it has more than [`PORTS_MAX`].
pub(super) fn read(list: Value<'_>, place: &'static str) -> Option<Vec<Port>> {
    let list = list.at_most(PORTS_MAX, "fewer ports")?;
    let read: Vec<_> = list.items().map(|item| port(item, place)).collect();
    let read: Option<Vec<_>> = read.into_iter().collect();
    Some(read?.into_iter().flatten().collect())
}

fn port(value: Value<'_>, place: &'static str) -> Option<Option<Port>> {
    let mut fields = value.foreign(place)?;
    let name = fields.get("name").map_or(Some(""), Value::text_or_empty);
    let number = fields.get("port").map(Value::port);
    let protocol = fields.get("protocol").map_or(Some("TCP"), Value::text);
    let target = fields.get("targetPort").map_or(Some("0"), Value::text);
    let (name, protocol, target) = (name?, protocol?, target?);
    let number = match number {
        Some(number) => number?,
        None => return Some(None),
    };
    let port = Port {
        name: name.into(),
        number,
        // Named target ports are resolved in the pods, and the slices have the result.
        target: target.parse().unwrap_or(0),
    };
    Some((protocol == "TCP").then_some(port))
}

/// Ports of a service, merged from several sources.
#[derive(Debug, Default)]
pub(super) struct Ports<'a> {
    /// Service port by port name.
    by_name: BTreeMap<&'a str, u16>,
    /// Target port by service port. 0 takes the port of the endpoints.
    pub(super) targets: BTreeMap<u16, u16>,
}

impl<'a> Ports<'a> {
    /// Adds the ports of one source. As in KEP-1645, a service has the ports of all sources. If
    /// a name has two numbers, the first source wins.
    pub(super) fn add(
        &mut self,
        ports: &'a [Port],
        service: &str,
        meta: &Meta,
        warnings: &mut LimitedFindings,
    ) {
        for port in ports {
            match self.by_name.get(&*port.name) {
                Some(number) if *number != port.number => {
                    let shown = match &*port.name {
                        "" => "without name",
                        name => name,
                    };
                    let what = format!(
                        "the port {shown} of {service} is {} here and {number} in an older export, \
                         which takes precedence",
                        port.number
                    );
                    let how = "the same number in all clusters";
                    warnings.push(Finding::warning(&meta.place, what, how).of(&meta.namespace));
                }
                Some(_) => {}
                None => {
                    self.by_name.insert(&port.name, port.number);
                    let target = self.targets.entry(port.number).or_insert(port.target);
                    if *target != port.target {
                        *target = 0;
                    }
                }
            }
        }
    }

    /// Adds ports without names, with their targets.
    pub(super) fn add_numbers<'b>(&mut self, ports: impl Iterator<Item = (&'b u16, &'b u16)>) {
        for (port, target) in ports {
            self.targets.entry(*port).or_insert(*target);
        }
    }

    /// Returns pairs of service port and endpoint port, for all names that both have.
    pub(super) fn of_slice(&self, ports: &[Port]) -> Vec<(u16, u16)> {
        let joined = ports.iter().filter_map(|port| {
            let number = self.by_name.get(&*port.name)?;
            Some((*number, port.number))
        });
        joined.collect()
    }
}
