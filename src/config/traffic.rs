//! The `traffic` section: preferred endpoints, weights of regions, and PROXY headers.

use std::sync::Arc;

use serde_json::json;

use super::define::{Hostname, NonEmpty, Percent, Weight, form, repeated, scalar, section, words};
use super::line::Line;
use crate::wire::RegionPattern;
use crate::yaml::Value;

section! {
    /// Preferred endpoints of one service, or of every one, and the headers that they get.
    pub struct TrafficRule at "traffic[]", derive(Default), check(check),
        compare(|_, read| repeated(read, service_name))
    {
        /// Hostname of the service, or `*` for every service. Each key is taken from the entry of
        /// the service, else from discovery, else from the entry of `*`.
        service: Option<String> as AnyService = required("echo.app.svc.cluster.local");
        /// Preferred endpoints. Without `gateway.locality` no endpoint is close.
        distribution: Option<Distribution> = default(
            None,
            "that of the service; else `any` with weights of `regions`, and `network` without");
        /// Percentage of ready endpoints below which a tier leaves a part of its share to the next
        /// one: with 35% ready of 70% it keeps half.
        spill_below: Option<u8> as Option<Percent> = default(
            None, "`70%`, or the factor of an Envoy control plane");
        /// Weights of regions. Once a weight is above 0, regions without a matching entry get
        /// nothing. `strait check` warns of regions without endpoints.
        regions: Vec<RegionWeight> as NonEmpty<RegionWeight> = default(
            Vec::new(), "each endpoint has its own weight");
        /// Use of the mean time of dials, in milliseconds, as load, so that near endpoints get
        /// more.
        latency: Option<bool> = default(None, "`false`");
        /// Header of the PROXY protocol before the bytes of a peer of a TLS listener. It states the
        /// addresses of the peer and of its destination. Endpoints must read it.
        proxy_protocol: Option<ProxyProtocol> = default(None, "`off`");
        /// Namespace whose services an entry of an object is limited to.
        namespace: Option<Arc<str>> = aside(|_| None);
        /// Other namespaces with a service behind the alias of that entry.
        alias_namespaces: Vec<Arc<str>> = aside(|_| Vec::new());
        /// The line of the entry, for findings that need the mesh.
        line: Line = aside(Line::of);
    }
}

words! {
    /// Preferred endpoints.
    pub enum Distribution {
        /// Those of the own zone, then of the own region, then of the own network.
        Close = "close" | "PreferClose",
        /// Those of the own network.
        Network = "network" | "PreferNetwork",
        /// Those of the own region, then of the own network.
        Region = "region" | "PreferRegion",
        /// No preference.
        Any = "any" | "Any",
    }
}

words! {
    /// Header of the PROXY protocol that endpoints get.
    pub enum ProxyProtocol {
        /// None.
        Off = "off",
        /// Version 2.
        V2 = "v2",
    }
}

section! {
    /// The weight of a region.
    pub struct RegionWeight at "traffic[].regions[]",
        compare(|_, read| repeated(read, |one| one.region.to_string()))
    {
        /// Region: `REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`. The longest
        /// match counts.
        region: RegionPattern = required("us-west-2/*");
        /// Part of the sum of all weights. Weight 0 drains the region.
        weight: u32 as Weight = required("10");
    }
}

fn check(traffic: TrafficRule, value: Value<'_>) -> Option<TrafficRule> {
    let regions = &traffic.regions;
    if regions.is_empty() || regions.iter().any(|one| one.weight > 0) {
        return Some(traffic);
    }
    let list = value.at("traffic[]", "regions");
    if regions.iter().any(|one| one.region.part_count() == 0) {
        let what = "evacuates every region: its weights sum to 0, and `*` is one of them";
        list.error(what, "a weight above 0 for a region that is to serve");
        return None;
    }
    let what = "has weights that sum to 0: these regions are evacuated, the others serve as if \
                there were no weights";
    list.warning(what, "a weight above 0 once they are to serve again");
    Some(traffic)
}

fn service_name(entry: &TrafficRule) -> String {
    entry.service.clone().unwrap_or_else(|| "*".to_owned())
}

form! {
    /// A hostname, or `*` for every service.
    AnyService => Option<String>,
        "the hostname of a service without port, or `*` for every service", "string",
        |value, wanted| value.parsed(wanted, |text| match text {
            "*" => Some(None),
            _ => Hostname::parse(text).map(Some),
        }),
        |service| json!(service);
}

scalar! {
    RegionPattern => RegionPattern,
        "`REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`", "string",
        |value, wanted| value.parsed(wanted, RegionPattern::parse),
        |region| json!(region.to_string());
}
