//! The `traffic` section: preferred endpoints, and weights of regions.

use std::sync::Arc;

use serde_json::json;

use super::define::{Hostname, NonEmpty, Percent, Weight, form, repeated, scalar, section, words};
use super::line::Line;
use crate::wire::RegionPattern;
use crate::yaml::Value;

section! {
    /// Preferred endpoints of one service, or of every one.
    pub struct Traffic at "traffic[]", check(check),
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

section! {
    /// The weight of a region.
    pub struct RegionWeight at "traffic[].regions[]",
        compare(|_, read| repeated(read, |one| one.region.to_string()))
    {
        /// Region: `REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`. The longest
        /// match counts.
        region: RegionPattern = required("us-west-2/*");
        /// Part of the sum of all weights. Weight 0 evacuates the region.
        weight: u32 as Weight = required("10");
    }
}

fn check(traffic: Traffic, value: Value<'_>) -> Option<Traffic> {
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

fn service_name(entry: &Traffic) -> String {
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

#[cfg(test)]
mod tests {
    use super::super::tests::{GOOD, check, with};
    use super::*;

    const LOCATED: &str = "gateway: {cluster: east, locality: {region: us-west-2, zone: a}}";

    fn reported(entries: &str) -> String {
        with(&format!("traffic: {entries}"))
    }

    #[test]
    fn every_key_is_read() {
        let text = r#"traffic:
  - service: ECHO.app.
    distribution: PreferClose
    spill_below: 50%
    regions:
      - {region: "us-west-2/*", weight: 10}
      - {region: us-west-2/us-west-2a, weight: 0}
      - {region: "*", weight: 90}
    latency: true
  - {service: "*", distribution: network, latency: false}
"#;
        let good = GOOD.replacen("gateway: {cluster: east}", LOCATED, 1);
        let (config, findings) = check(&format!("{good}{text}"));
        assert_eq!(findings, "");
        let traffic = config.unwrap().traffic;
        let region =
            |text, weight| RegionWeight { region: RegionPattern::parse(text).unwrap(), weight };
        let regions = [region("us-west-2", 10), region("us-west-2/us-west-2a", 0), region("*", 90)];
        let of_echo = Traffic {
            service: Some("echo.app".to_owned()),
            distribution: Some(Distribution::Close),
            spill_below: Some(50),
            regions: regions.into(),
            latency: Some(true),
            namespace: None,
            alias_namespaces: Vec::new(),
            line: Line::default(),
        };
        let of_every = Traffic {
            service: None,
            distribution: Some(Distribution::Network),
            spill_below: None,
            regions: Vec::new(),
            latency: Some(false),
            namespace: None,
            alias_namespaces: Vec::new(),
            line: Line::default(),
        };
        assert_eq!(traffic, [of_echo, of_every]);
    }

    #[test]
    fn every_distribution_has_its_names() {
        let (region, zone) = ("us-west-2".to_owned(), "a".to_owned());
        for &(word, want) in Distribution::WORDS {
            let text = format!("{GOOD}traffic: [{{service: a, distribution: {word}}}]");
            let text = text.replacen("gateway: {cluster: east}", LOCATED, 1);
            let (config, findings) = check(&text);
            assert_eq!(findings, "", "{word}");
            let config = config.unwrap();
            assert_eq!(config.traffic[0].distribution, Some(want), "{word}");
            assert_eq!(config.gateway.locality.region, region);
            assert_eq!(config.gateway.locality.zone, zone);
        }
    }

    #[test]
    fn a_mistake_is_reported_with_what_to_write() {
        let percent = "write a whole percentage from 0% to 100%, such as `70%`";
        let region = "write `REGION`, `REGION/*`, `REGION/ZONE`, `REGION/ZONE/SUBZONE` or `*`";
        let name = "write the hostname of a service without port, or `*` for every service";
        for (entry, want) in [
            ("{}", "`traffic[]` has no `service`; write `service: echo.app.svc.cluster.local`"),
            ("{service: \"a:80\"}", &*format!("`traffic[].service` is `a:80`; {name}")),
            ("{service: 10.0.0.1}", &format!("`traffic[].service` is `10.0.0.1`; {name}")),
            (
                "{service: a, distribution: near}",
                "`traffic[].distribution` cannot be `near`; write one of `close`, `network`, \
                 `region`, `any`, `PreferClose`, `PreferNetwork`, `PreferRegion`, `Any`",
            ),
            (
                "{service: a, spill_below: 70}",
                &format!("`traffic[].spill_below` is `70`; {percent}"),
            ),
            (
                "{service: a, spill_below: 101%}",
                &format!("`traffic[].spill_below` is `101%`; {percent}"),
            ),
            (
                "{service: a, spill_below: +7%}",
                &format!("`traffic[].spill_below` is `+7%`; {percent}"),
            ),
            (
                "{service: a, spill_below: 70.5%}",
                &format!("`traffic[].spill_below` is `70.5%`; {percent}"),
            ),
            (
                "{service: a, latency: fast}",
                "`traffic[].latency` is `fast`; write `true` or `false`",
            ),
            (
                "{service: a, weight: 1}",
                "unknown key `weight` in `traffic[]`; write one of `service`, `distribution`, \
                 `spill_below`, `regions`, `latency`",
            ),
            (
                "{service: a, regions: [{region: us-*, weight: 1}]}",
                &format!("`traffic[].regions[].region` is `us-*`; {region}"),
            ),
            (
                "{service: a, regions: [{region: us, weight: -1}]}",
                "`traffic[].regions[].weight` is `-1`; write a whole number from 0 to 4294967295",
            ),
            (
                "{service: a, regions: [{region: us}]}",
                "`traffic[].regions[]` has no `weight`; write `weight: 10`",
            ),
            ("{service: a, regions: []}", "`traffic[].regions` is empty; write at least one entry"),
            (
                "{service: a, regions: [{region: us, weight: 1}, {region: us/*, weight: 2}]}",
                "`traffic[].regions[]` has `us` twice, first on line 11; write each name once",
            ),
            (
                "{service: a, regions: [{region: us, weight: 0}, {region: \"*\", weight: 0}]}",
                "`traffic[].regions` evacuates every region: its weights sum to 0, and `*` is one \
                 of them; write a weight above 0 for a region that is to serve",
            ),
            (
                "{service: a}, {service: b}, {service: A}",
                "`traffic[]` has `a` twice, first on line 11; write each name once",
            ),
            (
                "{service: \"*\"}, {service: \"*\"}",
                "`traffic[]` has `*` twice, first on line 11; write each name once",
            ),
        ] {
            let want = format!("11: error: {want}");
            assert_eq!(reported(&format!("[{entry}]")), want, "{entry}");
        }
        assert_eq!(reported("{}"), "11: error: `traffic` is a map; write a list");
    }

    #[test]
    fn what_may_not_be_meant_is_a_warning() {
        assert_eq!(
            reported("[{service: a, regions: [{region: us, weight: 0}]}]"),
            "11: warning: `traffic[].regions` has weights that sum to 0: these regions are \
             evacuated, the others serve as if there were no weights; write a weight above 0 once \
             they are to serve again"
        );
        for (word, warns) in [("close", true), ("region", true), ("network", false), ("any", false)]
        {
            let findings = reported(&format!("[{{service: a, distribution: {word}}}]"));
            assert_eq!(findings.contains("`gateway.locality` is not set"), warns, "{word}");
        }
    }
}
