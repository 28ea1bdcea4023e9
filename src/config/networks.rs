//! The `networks` section: gateways of other networks.

use super::define::{Address, NonEmpty, repeated, section};
use super::line::Line;
use super::names::HostPort;
use super::trust::WorkloadId;
use crate::yaml::Value;

section! {
    /// Another network and its gateways.
    pub struct Network at "networks[]", derive(Default), check(check),
        compare(|_, read| repeated(read, |one| one.name.clone()))
    {
        /// Network, as the mesh labels it.
        name: String = required("west");
        /// Cluster that the certificate of each gateway has to lead to, which `trust` names.
        cluster: Option<String> = default(
            None,
            "that of the mesh's record of a gateway, else that of all instances behind its \
             address");
        /// Gateways, each with its HBONE port, besides those of the mesh. Hostnames are resolved,
        /// and each address is a gateway.
        gateways: Vec<HostPort> as NonEmpty<Address> = default(
            Vec::new(), "those of the mesh");
        /// Identities of which each gateway has to have one.
        identities: Vec<String> as NonEmpty<WorkloadId> = default(
            Vec::new(), "that of the mesh's record of a gateway, else any");
        /// The line of the entry, for findings that need other sections.
        line: Line = aside(Line::of);
    }
}

#[expect(clippy::unnecessary_wraps, reason = "a check may refuse what was read")]
fn check(network: Network, value: Value<'_>) -> Option<Network> {
    if network.cluster.is_none() && network.identities.is_empty() && !network.gateways.is_empty() {
        let what = "has gateways without `cluster` and `identities`, which are not used: no \
                    certificate can be proved to be theirs";
        value.warning(what, "`cluster: CLUSTER` or `identities: [spiffe://…]` beside them");
    }
    Some(network)
}
