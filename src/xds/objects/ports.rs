//! Ports of Services, imports and slices, joined by their names.

use std::collections::BTreeMap;

use super::{Place, shown};
use crate::yaml::{Finding, Severity, Value};

/// A port for TCP.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Port {
    /// Its name; a lone one may have none.
    pub(super) name: Box<str>,
    /// Its number; of a slice, that of the endpoints.
    pub(super) number: u16,
    /// The number at the endpoints, where a Service says it; otherwise 0.
    pub(super) target: u16,
}

/// Reads a list of ports. Those for other protocols are left out, and those of a slice that have
/// no number, which stand for all.
pub(super) fn read(list: Value<'_>, place: &'static str) -> Option<Vec<Port>> {
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
    fields.finish();
    let (name, protocol, target) = (name?, protocol?, target?);
    let number = match number {
        Some(number) => number?,
        None => return Some(None),
    };
    let port = Port {
        name: name.into(),
        number,
        // A name is looked up in the pods, of which the slices have said the outcome.
        target: target.parse().unwrap_or(0),
    };
    Some((protocol == "TCP").then_some(port))
}

/// The ports of a service that several sources tell of.
#[derive(Debug, Default)]
pub(super) struct Ports<'a> {
    /// The service's port by each name that an endpoint's has.
    by_name: BTreeMap<&'a str, u16>,
    /// The target port by the service's; 0 leaves it to the endpoints.
    pub(super) targets: BTreeMap<u16, u16>,
}

impl<'a> Ports<'a> {
    /// Adds the ports of one source. As KEP-1645 has it, a service has the ports of all, and where
    /// one name stands for two numbers the source that came first holds.
    pub(super) fn add(
        &mut self,
        ports: &'a [Port],
        (service, place): (&str, &Place),
        warnings: &mut Vec<Finding>,
    ) {
        for port in ports {
            match self.by_name.get(&*port.name) {
                Some(number) if *number != port.number => warnings.push(Finding {
                    place: place.clone(),
                    severity: Severity::Warning,
                    what: format!(
                        "the port {} of {service} is {} here and {number} in an older export, \
                         which holds",
                        match &*port.name {
                            "" => "without name",
                            name => name,
                        },
                        port.number
                    ),
                    how: "the same number in all clusters".to_owned(),
                }),
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

    /// Adds ports that have no names, with their targets.
    pub(super) fn add_numbers<'b>(&mut self, ports: impl Iterator<Item = (&'b u16, &'b u16)>) {
        for (port, target) in ports {
            self.targets.entry(*port).or_insert(*target);
        }
    }

    /// The service's port to that of a slice's endpoints, for all that both have.
    pub(super) fn of_slice(&self, ports: &[Port]) -> Vec<(u16, u16)> {
        let joined = ports.iter().filter_map(|port| {
            let number = self.by_name.get(&*port.name)?;
            Some((*number, port.number))
        });
        joined.collect()
    }
}

/// A warning about an object.
pub(super) fn warning(place: &Place, what: String, how: &str) -> Finding {
    Finding {
        place: place.clone(),
        severity: Severity::Warning,
        what,
        how: how.to_owned(),
    }
}

/// A warning that something is said twice, and differently.
pub(super) fn twice(place: &Place, first: &Place, what: &str) -> Finding {
    let what = format!("{what} is another one at {}, which holds", shown(first));
    warning(place, what, "it once, or the same")
}
